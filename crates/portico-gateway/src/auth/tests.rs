//! Token review on a paused clock, by API servers that do as a test says.

use std::collections::HashSet;
use std::future::pending;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};

use futures_util::future::BoxFuture;
use portico_tunnel::Protocol;
use tokio::time::{Instant, advance, sleep};

use super::review::{MAX_ACCEPTED_PER_CLUSTER, MAX_PER_CLUSTER, PATIENCE, REVIEW_TIMEOUT, SHARES, WAITER};
use super::*;

const INTERVAL: Duration = Duration::from_secs(60);

/// What requests that wait may take, those of one cluster a quarter.
const REVIEW_MEMORY: usize = 8 << 20;

/// How long an API server that answers takes.
const REVIEW: Duration = Duration::from_millis(5);

/// The API server of one cluster.
#[derive(Debug)]
struct ApiServer {
    cluster: Tenant,
    id: Hash,
    refused: Mutex<HashSet<String>>,
    seen: Mutex<HashSet<String>>,
    /// Whether it takes every connection and says nothing. To tokens that begin with `hangs` it never does.
    hangs: AtomicBool,
    is_away: AtomicBool,
    reviews: AtomicUsize,
    under_way: AtomicUsize,
    most_under_way: AtomicUsize,
}

struct UnderWay<'a>(&'a AtomicUsize);

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, SeqCst);
    }
}

impl ApiServer {
    fn new(cluster: &str) -> Arc<Self> {
        Arc::new(Self {
            cluster: Tenant::of_text(cluster),
            id: hash(&[cluster.as_bytes()]),
            refused: Mutex::default(),
            seen: Mutex::default(),
            hangs: AtomicBool::default(),
            is_away: AtomicBool::default(),
            reviews: AtomicUsize::default(),
            under_way: AtomicUsize::default(),
            most_under_way: AtomicUsize::default(),
        })
    }

    fn refuse(&self, token: &str) {
        self.refused.lock().unwrap().insert(token.to_owned());
    }

    fn accepted_once(&self, token: &str) -> bool {
        self.seen.lock().unwrap().insert(token.to_owned())
    }

    fn reviews(&self) -> usize {
        self.reviews.load(SeqCst)
    }
}

impl TokenReviewer for ApiServer {
    fn cluster(&self) -> &Tenant {
        &self.cluster
    }

    fn id(&self) -> &Hash {
        &self.id
    }

    fn review<'a>(&'a self, token: &'a str) -> BoxFuture<'a, Answer> {
        Box::pin(async move {
            self.reviews.fetch_add(1, SeqCst);
            let under_way = self.under_way.fetch_add(1, SeqCst) + 1;
            self.most_under_way.fetch_max(under_way, SeqCst);
            let _under_way = UnderWay(&self.under_way);
            if token.starts_with("hangs") || self.hangs.load(SeqCst) {
                pending::<()>().await;
            }
            sleep(REVIEW).await;
            // A token that begins with `fails` is accepted once.
            let fails = token.starts_with("fails") && !self.accepted_once(token);
            if fails || self.is_away.load(SeqCst) {
                return Answer::Failed("away".into());
            }
            if self.refused.lock().unwrap().contains(token) { Answer::No("gone".into()) } else { Answer::Yes }
        })
    }
}

fn request(token: &str) -> Request {
    Request {
        authority: "a.test:443".into(),
        certificate: None,
        token: Token::from_header(&format!("Bearer {token}")),
        protocol: Protocol::Http2,
        tls: true,
        client_first: false,
    }
}

/// A gateway that reviews tokens, and revokes while this is held.
struct Gateway {
    identities: Arc<Identities>,
    /// Calls to cut streams.
    cuts: Arc<AtomicUsize>,
    supervisor: tokio::task::JoinHandle<()>,
}

impl Gateway {
    fn start() -> Self {
        let tokens = TokenSettings { file: None, review: Some(INTERVAL) };
        let config =
            Config { tokens, max_unauthenticated: 100, review_memory: REVIEW_MEMORY, ..Config::default() };
        let identities = Arc::new(Identities::new(&config));
        let cuts = Arc::<AtomicUsize>::default();
        let (of_task, count) = (Arc::clone(&identities), Arc::clone(&cuts));
        let supervisor = tokio::spawn(async move {
            of_task
                .supervise(|| {
                    count.fetch_add(1, SeqCst);
                    1
                })
                .await;
        });
        Self { identities, cuts, supervisor }
    }

    /// On a connection that ends with the credential.
    async fn authenticate(&self, api: &Arc<ApiServer>, token: &str) -> Result<Arc<Credential>, Refusal> {
        self.authenticate_on(&Credentials::default(), api, token).await
    }

    async fn authenticate_on(
        &self,
        connection: &Credentials,
        api: &Arc<ApiServer>,
        token: &str,
    ) -> Result<Arc<Credential>, Refusal> {
        self.outcome(connection, api, token).await.map_err(|denied| denied.refusal)
    }

    async fn outcome(
        &self,
        connection: &Credentials,
        api: &Arc<ApiServer>,
        token: &str,
    ) -> Result<Arc<Credential>, Denied> {
        let request = request(token);
        let wanted = Wanted {
            cluster: Some(&api.cluster),
            client_admitted: true,
            reviewer: &|| Some(Arc::clone(api) as Arc<dyn TokenReviewer>),
        };
        let outcome = self.identities.authenticate(connection, &request, &wanted).await;
        outcome.map(|credential| credential.expect("tokens are asked for"))
    }

    /// A `token` was accepted and is due. Its API server hangs, under a [`flood`](Self::flood).
    async fn flooded(at_once: usize) -> (Arc<Self>, Arc<ApiServer>) {
        let (gateway, api) = (Arc::new(Self::start()), ApiServer::new("a"));
        gateway.authenticate(&api, "token").await.unwrap();
        advance(INTERVAL).await;
        api.hangs.store(true, SeqCst);
        gateway.flood(&api, at_once);
        sleep(REVIEW).await;
        (gateway, api)
    }

    /// Shows made-up tokens for as long as the test runs. So many are shown at once, and others as soon as
    /// they are refused.
    fn flood(self: &Arc<Self>, api: &Arc<ApiServer>, at_once: usize) {
        for number in 0..at_once {
            let (gateway, api) = (Arc::clone(self), Arc::clone(api));
            tokio::spawn(async move {
                for round in 0.. {
                    let refused = gateway.authenticate(&api, &format!("hangs-{number}-{round}")).await;
                    assert!(refused.is_err(), "nobody knows a made-up token");
                }
            });
        }
    }
}

impl Drop for Gateway {
    fn drop(&mut self) {
        self.supervisor.abort();
    }
}

#[tokio::test(start_paused = true)]
async fn requests_that_wait_hold_no_more_memory_than_they_may_together() {
    let gateway = Arc::new(Gateway::start());
    let others = ApiServer::new("others");
    let known = format!("{:-<1$}", "known", MAX_TOKEN);
    gateway.authenticate(&others, &known).await.unwrap();
    others.refuse(&known);
    advance(INTERVAL).await;
    let held = WAITER + MAX_TOKEN;
    let most = u32::try_from(REVIEW_MEMORY / held).unwrap();
    let long = |number| format!("{:-<1$}", format!("hangs-{number}"), MAX_TOKEN);
    let mut tasks = Vec::new();
    for number in 0..most {
        let (gateway, api) = (Arc::clone(&gateway), ApiServer::new(&format!("c{}", number % 10)));
        tasks.push(tokio::spawn(async move { gateway.authenticate(&api, &long(number)).await }));
    }
    sleep(REVIEW).await;
    let reviews = gateway.identities.reviews().unwrap();
    assert_eq!((reviews.waiting, reviews.waiting_bytes), (most, most as usize * held));
    let refused = gateway.authenticate(&others, &long(most)).await;
    assert_eq!(refused.unwrap_err(), Refusal::MaxReviewsWaiting, "by whatever cluster");
    gateway.authenticate(&others, &known).await.expect("it has its grace");
    for task in tasks {
        assert!(task.await.unwrap().is_err());
    }
    assert_eq!(gateway.identities.reviews().unwrap().waiting_bytes, 0, "every byte is given back");
}

#[tokio::test(start_paused = true)]
async fn requests_that_wait_are_bounded_for_a_cluster_and_keep_out_no_token_within_its_grace() {
    let (gateway, api, other) = (Arc::new(Gateway::start()), ApiServer::new("a"), ApiServer::new("b"));
    gateway.authenticate(&api, "token").await.unwrap();
    let long = |number| format!("{:-<1$}", format!("hangs-{number}"), MAX_TOKEN);
    let most = u32::try_from(REVIEW_MEMORY / SHARES / (WAITER + MAX_TOKEN)).unwrap();
    let fill = || {
        let wait = |number| {
            let (gateway, api) = (Arc::clone(&gateway), Arc::clone(&api));
            tokio::spawn(async move { gateway.authenticate(&api, &long(number)).await })
        };
        (0..most).map(wait).collect::<Vec<_>>()
    };
    advance(INTERVAL).await;
    let tasks = fill();
    sleep(REVIEW).await;
    assert_eq!(gateway.identities.reviews().unwrap().waiting, most);
    assert_eq!(gateway.authenticate(&api, &long(most)).await.unwrap_err(), Refusal::MaxReviewsWaiting);
    gateway.authenticate(&other, "new").await.unwrap();
    api.refuse("token");
    let credential = gateway.authenticate(&api, "token").await.unwrap();
    for task in tasks {
        assert!(task.await.unwrap().is_err());
    }
    assert_eq!(gateway.identities.reviews().unwrap().waiting, 0, "every waiter is gone");
    sleep(INTERVAL).await;
    assert!(credential.is_revoked(), "what had the grace is reviewed again");
    assert_eq!(gateway.authenticate(&api, "token").await.unwrap_err(), Refusal::Unauthenticated);

    gateway.authenticate(&api, "late").await.unwrap();
    sleep(Duration::from_secs(601)).await;
    let _waiting = fill();
    sleep(REVIEW).await;
    // The rest is less than any request takes.
    assert_eq!(gateway.authenticate(&api, "late").await.unwrap_err(), Refusal::MaxReviewsWaiting);
}

#[tokio::test(start_paused = true)]
async fn a_request_that_waits_is_small() {
    let (gateway, api) = (Gateway::start(), ApiServer::new("a"));
    let connection = Credentials::default();
    let request = request("token");
    let wanted = Wanted {
        cluster: Some(&api.cluster),
        client_admitted: true,
        reviewer: &|| Some(Arc::clone(&api) as Arc<dyn TokenReviewer>),
    };
    let request_itself = size_of_val(&gateway.identities.authenticate(&connection, &request, &wanted));
    let reviews = gateway.identities.reviews.as_ref().unwrap();
    let token = reviews.token(request.token.as_ref().unwrap(), Arc::clone(&api) as Arc<dyn TokenReviewer>);
    let wait = size_of_val(&reviews.wait(&token));
    assert!(request_itself + wait <= 1_024, "{request_itself} + {wait} bytes");
}

#[tokio::test(start_paused = true)]
async fn where_no_ca_can_be_read_the_log_does_not_say_that_none_is_there() {
    let gateway = Gateway::start();
    let cluster = Tenant::of_text("a");
    let wanted = Wanted { cluster: Some(&cluster), client_admitted: true, reviewer: &|| None };
    let outcome = gateway.identities.authenticate(&Credentials::default(), &request("token"), &wanted).await;
    assert_eq!(
        outcome.unwrap_err().detail,
        "tokens of this cluster cannot be reviewed: neither its Cluster nor its Service apiserver-external \
         carries an annotation portico.k8c.io/api-server-ca that can be read"
    );
}

#[tokio::test(start_paused = true)]
async fn requests_with_one_token_share_one_review() {
    let (gateway, api) = (Gateway::start(), ApiServer::new("a"));
    let all = futures_util::future::join_all((0..100).map(|_| gateway.authenticate(&api, "token"))).await;
    assert!(all.iter().all(Result::is_ok));
    assert_eq!(api.reviews(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_cluster_has_so_many_reviews_at_a_time_and_leaves_the_rest_to_others() {
    let gateway = Arc::new(Gateway::start());
    let (flooded, other) = (ApiServer::new("a"), ApiServer::new("b"));
    gateway.flood(&flooded, 300);
    sleep(Duration::from_secs(20)).await;
    assert_eq!(flooded.most_under_way.load(SeqCst), MAX_PER_CLUSTER);
    let begun = Instant::now();
    gateway.authenticate(&other, "token").await.unwrap();
    assert!(begun.elapsed() < 2 * REVIEW, "it took {:?}", begun.elapsed());
}

#[tokio::test(start_paused = true)]
async fn a_flood_of_made_up_tokens_does_not_keep_a_token_in_use_from_being_revoked() {
    let (gateway, api) = (Arc::new(Gateway::start()), ApiServer::new("a"));
    let credential = gateway.authenticate(&api, "token").await.unwrap();
    gateway.flood(&api, 300);
    sleep(INTERVAL / 2).await;
    assert!(!credential.is_revoked());
    api.refuse("token");
    // Half a second until it is noticed to be due, and twice for a permit and the review, which is confirmed.
    let wait = PATIENCE + REVIEW_TIMEOUT;
    sleep(INTERVAL / 2 + Duration::from_millis(500) + 2 * wait + Duration::from_secs(3)).await;
    assert!(credential.is_revoked());
}

#[tokio::test(start_paused = true)]
async fn a_token_is_revoked_by_a_no_that_is_confirmed() {
    let (gateway, api) = (Gateway::start(), ApiServer::new("a"));
    let credential = gateway.authenticate(&api, "token").await.unwrap();
    api.refuse("token");
    while api.reviews() < 2 {
        sleep(REVIEW).await;
    }
    sleep(2 * REVIEW).await;
    api.refused.lock().unwrap().clear();
    sleep(INTERVAL).await;
    assert!(api.reviews() > 2 && !credential.is_revoked(), "an API server that has just started may say no");
    assert_eq!(gateway.cuts.load(SeqCst), 0);
    api.refuse("token");
    sleep(INTERVAL + Duration::from_secs(3)).await;
    assert!(credential.is_revoked());
    assert_eq!(gateway.cuts.load(SeqCst), 1);
    assert_eq!(gateway.authenticate(&api, "token").await.unwrap_err(), Refusal::Unauthenticated);
}

#[tokio::test(start_paused = true)]
async fn a_token_that_is_refused_has_no_certificate_verified_again() {
    let (gateway, api) = (Gateway::start(), ApiServer::new("a"));
    let (connection, registry) = (Credentials::default(), &gateway.identities.registry);
    // A check would revoke it: there is no file.
    let by_file = connection.accept(registry, &api.cluster, &Evidence::StaticToken(hash(&[b"gone"])));
    let reviewed = gateway.authenticate(&api, "token").await.unwrap();
    api.refuse("token");
    sleep(2 * INTERVAL).await;
    assert!(reviewed.is_revoked() && !by_file.is_revoked());
    gateway.identities.changed();
    sleep(Duration::from_secs(1)).await;
    assert!(by_file.is_revoked(), "a change of files concerns all");
}

#[tokio::test(start_paused = true)]
async fn a_thousand_tokens_of_an_account_that_is_gone_are_revoked_together() {
    let (gateway, api) = (Gateway::start(), ApiServer::new("a"));
    let tokens: Vec<_> = (0..1_000).map(|number| format!("token-{number}")).collect();
    let mut credentials = Vec::new();
    for token in &tokens {
        credentials.push(gateway.authenticate(&api, token).await.unwrap());
        api.refuse(token);
    }
    // One round may be under way, and each confirms twice: its first token, then the rest.
    sleep(INTERVAL + Duration::from_secs(10)).await;
    assert!(credentials.iter().all(|credential| credential.is_revoked()));
    assert_eq!(api.most_under_way.load(SeqCst), MAX_PER_CLUSTER);
    let cuts = gateway.cuts.load(SeqCst);
    assert!(cuts < 100, "each of {cuts} cuts looks at all connections");
}

#[tokio::test(start_paused = true)]
async fn an_api_server_that_hangs_is_asked_about_one_token_in_use_at_a_time() {
    let (gateway, api) = (Gateway::start(), ApiServer::new("a"));
    let mut credentials = Vec::new();
    for number in 0..100 {
        credentials.push(gateway.authenticate(&api, &format!("token-{number}")).await.unwrap());
    }
    api.hangs.store(true, SeqCst);
    api.most_under_way.store(0, SeqCst);
    sleep(2 * INTERVAL).await;
    assert_eq!(api.most_under_way.load(SeqCst), 1);
    gateway.authenticate(&api, "token-1").await.unwrap();
    let begun = Instant::now();
    gateway.authenticate(&api, "token-1").await.unwrap();
    assert_eq!(begun.elapsed(), Duration::ZERO, "an accepted token waits for it once");
    assert!(credentials.iter().all(|credential| !credential.is_revoked()));

    api.hangs.store(false, SeqCst);
    api.refuse("token-99");
    sleep(INTERVAL).await;
    let revoked: Vec<_> = credentials.iter().map(|credential| credential.is_revoked()).collect();
    assert!(revoked[99] && revoked[..99].iter().all(|revoked| !revoked));
}

#[tokio::test(start_paused = true)]
async fn after_the_grace_a_token_is_refused_and_what_rests_on_it_stays_until_a_no() {
    let (gateway, api) = (Gateway::start(), ApiServer::new("a"));
    let credential = gateway.authenticate(&api, "token").await.unwrap();
    api.is_away.store(true, SeqCst);
    sleep(Duration::from_secs(590)).await;
    gateway.authenticate(&api, "token").await.unwrap();
    sleep(Duration::from_secs(20)).await;
    let denied = gateway.outcome(&Credentials::default(), &api, "token").await.unwrap_err();
    assert_eq!((denied.refusal, denied.shown), (Refusal::ReviewFailed, Refusal::ReviewFailed));
    let denied = gateway.outcome(&Credentials::default(), &api, "made up").await.unwrap_err();
    let why = "a client that was never accepted is not told that the cluster is there";
    assert_eq!((denied.refusal, denied.shown), (Refusal::ReviewFailed, Refusal::Unauthenticated), "{why}");
    assert!(!credential.is_revoked());
    api.is_away.store(false, SeqCst);
    api.refuse("token");
    sleep(Duration::from_secs(6)).await;
    assert!(credential.is_revoked());
}

#[tokio::test(start_paused = true)]
async fn after_a_review_that_failed_a_token_is_reviewed_again_however_short_its_connections_are() {
    let (gateway, api) = (Gateway::start(), ApiServer::new("a"));
    gateway.authenticate(&api, "token").await.unwrap();
    advance(INTERVAL).await;
    api.is_away.store(true, SeqCst);
    gateway.authenticate(&api, "token").await.expect("nobody can be asked");
    api.is_away.store(false, SeqCst);
    api.refuse("token");
    let begun = Instant::now();
    while gateway.authenticate(&api, "token").await.is_ok() {
        assert!(begun.elapsed() < Duration::from_secs(6), "it is not reviewed");
        sleep(Duration::from_millis(400)).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_token_with_a_grace_waits_three_seconds_at_most_whatever_else_is_reviewed() {
    let (gateway, api) = Gateway::flooded(MAX_PER_CLUSTER).await;
    let begun = Instant::now();
    gateway.authenticate(&api, "token").await.unwrap();
    assert!(begun.elapsed() <= PATIENCE, "it took {:?}", begun.elapsed());
}

#[tokio::test(start_paused = true)]
async fn a_token_with_a_grace_waits_no_longer_while_others_are_revoked() {
    let (gateway, api) = Gateway::flooded(300).await;
    let announcer = Arc::clone(&gateway);
    let revocations = tokio::spawn(async move {
        loop {
            sleep(Duration::from_secs(1)).await;
            announcer.identities.changes.announce(Affected::All);
        }
    });
    let begun = Instant::now();
    gateway.authenticate(&api, "token").await.unwrap();
    assert!(begun.elapsed() <= PATIENCE, "it took {:?}", begun.elapsed());
    revocations.abort();
}

#[tokio::test(start_paused = true)]
async fn a_token_with_a_grace_is_let_in_at_last_although_its_connections_give_way_to_others() {
    let (gateway, api) = Gateway::flooded(300).await;
    let begun = Instant::now();
    // A second each: then the slot of the connection is needed.
    let second = Duration::from_secs(1);
    while tokio::time::timeout(second, gateway.authenticate(&api, "token")).await.is_err() {
        let most = PATIENCE + REVIEW_TIMEOUT + REVIEW_TIMEOUT;
        assert!(begun.elapsed() <= most, "it is kept out for {:?}", begun.elapsed());
    }
    let (begun, tries) = (Instant::now(), 10);
    for _ in 0..tries {
        gateway.authenticate(&api, "token").await.unwrap();
        sleep(second).await;
    }
    assert_eq!(begun.elapsed(), tries * second, "no request waits while its reviews fail");
}

#[tokio::test(start_paused = true)]
async fn requests_ask_an_api_server_that_hangs_about_one_token_at_a_time_once_a_review_has_failed() {
    let (gateway, api) = (Gateway::start(), ApiServer::new("a"));
    let tokens: Vec<_> = (0..100).map(|number| format!("token-{number}")).collect();
    for token in &tokens {
        gateway.authenticate(&api, token).await.unwrap();
    }
    advance(INTERVAL).await;
    api.hangs.store(true, SeqCst);
    let all = || futures_util::future::join_all(tokens.iter().map(|token| gateway.authenticate(&api, token)));
    // Each has a review of its own first, eight at a time for three seconds each.
    for _ in 0..20 {
        assert!(all().await.iter().all(Result::is_ok));
        sleep(REVIEW_TIMEOUT).await;
    }
    api.most_under_way.store(0, SeqCst);
    for _ in 0..30 {
        assert!(all().await.iter().all(Result::is_ok));
        sleep(Duration::from_secs(1)).await;
    }
    assert_eq!(api.most_under_way.load(SeqCst), 1);
}

#[tokio::test(start_paused = true)]
async fn a_token_is_reviewed_anew_where_another_ca_signed_for_the_api_server() {
    let (gateway, before) = (Gateway::start(), ApiServer::new("a"));
    gateway.authenticate(&before, "token").await.unwrap();
    let mut anew = Arc::into_inner(ApiServer::new("a")).unwrap();
    anew.id = hash(&[b"another"]);
    let anew = Arc::new(anew);
    anew.refuse("token");
    assert_eq!(gateway.authenticate(&anew, "token").await.unwrap_err(), Refusal::Unauthenticated);
}

#[tokio::test(start_paused = true)]
async fn a_stream_ends_with_the_word_of_the_api_server_that_vouched_for_it() {
    let (gateway, first) = (Gateway::start(), ApiServer::new("a"));
    let mut second = Arc::into_inner(ApiServer::new("a")).unwrap();
    second.id = hash(&[b"another"]);
    let (second, connection) = (Arc::new(second), Credentials::default());
    let by_first = gateway.authenticate_on(&connection, &first, "token").await.unwrap();
    let by_second = gateway.authenticate_on(&connection, &second, "token").await.unwrap();
    first.refuse("token");
    sleep(INTERVAL + Duration::from_secs(3)).await;
    assert!(by_first.is_revoked(), "whatever another API server of the cluster says");
    assert!(!by_second.is_revoked());
    let renewed = gateway.authenticate_on(&connection, &second, "next").await.unwrap();
    assert!(Arc::ptr_eq(&by_second, &renewed), "streams rest on the new token of the same API server");
}

#[tokio::test(start_paused = true)]
async fn a_no_to_one_request_revokes_the_credentials_of_all_connections() {
    let (gateway, api) = (Gateway::start(), ApiServer::new("a"));
    let credential = gateway.authenticate(&api, "token").await.unwrap();
    api.refuse("token");
    // The supervisor has not looked yet when the request comes.
    advance(INTERVAL).await;
    assert_eq!(gateway.authenticate(&api, "token").await.unwrap_err(), Refusal::Unauthenticated);
    sleep(Duration::from_millis(1)).await;
    assert!(credential.is_revoked());
}

#[tokio::test(start_paused = true)]
async fn made_up_tokens_displace_their_like_and_no_token_that_was_accepted() {
    let (gateway, api) = (Gateway::start(), ApiServer::new("a"));
    let credential = gateway.authenticate(&api, "token").await.unwrap();
    api.is_away.store(true, SeqCst);
    for number in 0..11_000 {
        assert!(gateway.authenticate(&api, &format!("made-up-{number}")).await.is_err());
    }
    let remembered = gateway.identities.reviews().unwrap().remembered;
    assert!(remembered <= 10_001, "{remembered} are remembered");
    gateway.authenticate(&api, "token").await.unwrap();
    assert!(!credential.is_revoked());
}

#[tokio::test(start_paused = true)]
async fn accepted_tokens_of_one_cluster_displace_none_of_another() {
    let (gateway, [minting, api]) = (Gateway::start(), ["minting", "a"].map(ApiServer::new));
    gateway.authenticate(&api, "before").await.unwrap();
    for number in 0..MAX_ACCEPTED_PER_CLUSTER + 11_000 {
        gateway.authenticate(&minting, &format!("valid-{number}")).await.unwrap();
    }
    gateway.authenticate(&api, "after").await.unwrap();
    let remembered = gateway.identities.reviews().unwrap().remembered;
    assert!(remembered <= MAX_ACCEPTED_PER_CLUSTER as u64 + 10_002, "{remembered} are remembered");
    api.is_away.store(true, SeqCst);
    advance(INTERVAL).await;
    for token in ["before", "after"] {
        gateway.authenticate(&api, token).await.expect("it has its grace");
    }
}

#[tokio::test(start_paused = true)]
async fn tokens_whose_reviews_fail_do_not_keep_another_from_being_revoked() {
    let (gateway, api) = (Gateway::start(), ApiServer::new("a"));
    let mut poison = Vec::new();
    for number in 0..10 {
        poison.push(gateway.authenticate(&api, &format!("fails-{number}")).await.unwrap());
    }
    let credential = gateway.authenticate(&api, "token").await.unwrap();
    api.refuse("token");
    sleep(2 * INTERVAL).await;
    assert!(credential.is_revoked() && poison.iter().all(|credential| !credential.is_revoked()));
}
