//! What is known of our identity, and what becomes of requests that a gateway does not want: on a clock that
//! the tests move.

use std::time::Duration;

use super::harness::settings;
use super::scripted::{Answer, Scripted};
use crate::common::UPSTREAM;
use h2::Reason;
use portico_lab::clock::Clock;
use portico_tunnel::StatusCode;
use portico_tunnel::client::{Client, ClientSettings, IdentityState, OpenError, TunnelState};
use tokio::time::Instant;

const OPENS: Answer = Answer::Status(StatusCode::OK);
const NO: Answer = Answer::Status(StatusCode::UNAUTHORIZED);
const MINUTE: Duration = Duration::from_secs(60);

fn client_of(gateway: &Scripted) -> Client {
    client_of_all([gateway])
}

/// A client with one tunnel for each gateway.
fn client_of_all<const N: usize>(gateways: [&Scripted; N]) -> Client {
    let settings = settings(&gateways.map(|gateway| gateway.address));
    // Steps of the clock are too large for PING to be answered within its time.
    Client::start(ClientSettings { ping_interval: Duration::from_secs(100_000), tunnels: N, ..settings })
}

fn identity(client: &Client) -> Option<IdentityState> {
    client.status().first().map(|tunnel| tunnel.identity.clone())
}

fn is_refused(client: &Client) -> bool {
    matches!(identity(client), Some(IdentityState::Refused { .. }))
}

fn is_accepted(client: &Client) -> bool {
    identity(client) == Some(IdentityState::Accepted)
}

async fn refused(clock: &Clock, client: &Client, status: StatusCode) {
    let error = clock.by(client.open(UPSTREAM)).await.unwrap_err();
    assert!(matches!(error, OpenError::Refused { status: said, .. } if said == status), "{error}");
}

#[tokio::test]
async fn an_identity_that_goes_bad_later_is_shown_until_it_is_good_again() {
    let clock = Clock::new();
    let gateway = Scripted::start(OPENS, StatusCode::NO_CONTENT).await;
    let client = client_of(&gateway);
    clock.until("accepted", || is_accepted(&client)).await;
    clock.pass(MINUTE).await;
    assert_eq!(gateway.options(), 1, "nothing is asked while nothing is amiss");
    gateway.to_connect.send_replace(NO);
    gateway.to_options.send_replace(StatusCode::UNAUTHORIZED);
    let bad = Instant::now();
    refused(&clock, &client, StatusCode::UNAUTHORIZED).await;
    clock.until("refused", || is_refused(&client)).await;
    assert!(bad.elapsed() < Duration::from_secs(1), "{:?}", bad.elapsed());
    clock.pass(MINUTE).await;
    assert!(is_refused(&client));
    // Found without a pod that tries.
    gateway.to_options.send_replace(StatusCode::NO_CONTENT);
    clock.until("accepted again", || is_accepted(&client)).await;
}

#[tokio::test]
async fn a_name_that_is_not_for_us_does_not_make_our_identity_bad() {
    let clock = Clock::new();
    let gateway = Scripted::start(Answer::Status(StatusCode::FORBIDDEN), StatusCode::NO_CONTENT).await;
    let client = client_of(&gateway);
    clock.until("accepted", || is_accepted(&client)).await;
    let begun = Instant::now();
    while begun.elapsed() < MINUTE {
        refused(&clock, &client, StatusCode::FORBIDDEN).await;
        assert!(is_accepted(&client));
        clock.pass(Duration::from_millis(100)).await;
    }
    assert!(is_accepted(&client));
    // Every five to fifteen seconds.
    assert!((4..=13).contains(&gateway.options()), "{}", gateway.options());
}

#[tokio::test]
async fn where_a_gateway_does_not_know_the_question_its_answer_to_connect_counts() {
    let clock = Clock::new();
    let gateway = Scripted::start(OPENS, StatusCode::NOT_FOUND).await;
    let client = client_of(&gateway);
    clock.until("asked", || gateway.options() == 1).await;
    gateway.to_connect.send_replace(NO);
    refused(&clock, &client, StatusCode::UNAUTHORIZED).await;
    clock.until("refused", || is_refused(&client)).await;
    clock.pass(MINUTE).await;
    assert!(is_refused(&client));
    gateway.to_connect.send_replace(OPENS);
    let _stream = clock.by(client.open(UPSTREAM)).await.unwrap();
    clock.until("not refused", || identity(&client) == Some(IdentityState::Unknown)).await;
}

#[tokio::test]
async fn a_gateway_that_cannot_say_now_is_asked_again() {
    let clock = Clock::new();
    for busy in [StatusCode::TOO_MANY_REQUESTS, StatusCode::SERVICE_UNAVAILABLE] {
        let gateway = Scripted::start(OPENS, busy).await;
        let client = client_of(&gateway);
        clock.until("asked", || gateway.options() == 1).await;
        gateway.to_options.send_replace(StatusCode::NO_CONTENT);
        clock.until("accepted", || is_accepted(&client)).await;
    }
}

#[tokio::test]
async fn a_connection_that_refuses_us_is_replaced_by_one_to_another_gateway_that_does_not() {
    let clock = Clock::new();
    let (refuses, opens) = (
        Scripted::start(NO, StatusCode::UNAUTHORIZED).await,
        Scripted::start(OPENS, StatusCode::NO_CONTENT).await,
    );
    let all = settings(&[refuses.address, opens.address]);
    let all = ClientSettings { ping_interval: Duration::from_secs(100_000), tunnels: 1, ..all };
    // Which of the two it connects to first is chance: of so many one begins with the one that refuses.
    let clients: Vec<_> = (0..40).map(|_| Client::start(all.clone())).collect();
    clock.until("asked", || refuses.options() > 0).await;
    clock.until("accepted", || clients.iter().all(is_accepted)).await;
}

#[tokio::test]
async fn tokens_that_change_while_we_are_refused_make_no_crowd() {
    let clock = Clock::new();
    let gateway = Scripted::start(NO, StatusCode::UNAUTHORIZED).await;
    let client = client_of(&gateway);
    clock.until("refused", || is_refused(&client)).await;
    for _ in 0..100 {
        client.token_changed();
        clock.pass(Duration::from_millis(50)).await;
    }
    let asked = gateway.options();
    clock.pass(MINUTE).await;
    assert!((4..=13).contains(&(gateway.options() - asked)), "{}", gateway.options() - asked);
    // A new token is shown at once.
    gateway.to_options.send_replace(StatusCode::NO_CONTENT);
    client.token_changed();
    let shown = Instant::now();
    clock.until("accepted", || is_accepted(&client)).await;
    assert!(shown.elapsed() < Duration::from_secs(1), "{:?}", shown.elapsed());
}

#[tokio::test]
async fn a_stream_that_every_gateway_resets_fails_at_once() {
    let clock = Clock::new();
    let gateway = Scripted::start(Answer::Reset(Reason::REFUSED_STREAM), StatusCode::NO_CONTENT).await;
    let client = client_of(&gateway);
    clock.until("accepted", || is_accepted(&client)).await;
    let begun = Instant::now();
    let error = clock.by(client.open(UPSTREAM)).await.unwrap_err();
    assert!(begun.elapsed() < Duration::from_secs(1), "{:?}", begun.elapsed());
    let OpenError::Unanswered { why, .. } = &error else { panic!("{error}") };
    assert!(why.contains("refused stream"), "{error}");
    // That a tunnel gets no successor gives no hope of another.
    gateway.accepts.send_replace(false);
    client.certificate_changed();
    clock.until("no successor", || client.status().iter().any(|tunnel| tunnel.error.is_some())).await;
    let begun = Instant::now();
    clock.by(client.open(UPSTREAM)).await.unwrap_err();
    assert!(begun.elapsed() < Duration::from_secs(1), "{:?}", begun.elapsed());
}

/// Tunnels in that state.
fn tunnels(client: &Client, state: TunnelState) -> usize {
    client.status().iter().filter(|tunnel| tunnel.state == Some(state)).count()
}

#[tokio::test]
async fn a_gateway_that_cannot_review_our_token_leaves_the_stream_to_another() {
    let clock = Clock::new();
    let cannot_review = Scripted::start(NO, StatusCode::NO_CONTENT).await;
    let opens = Scripted::start(OPENS, StatusCode::NO_CONTENT).await;
    let client = client_of_all([&cannot_review, &opens]);
    clock.until("both asked", || cannot_review.options() == 1 && opens.options() == 1).await;
    let mut streams = Vec::new();
    for _ in 0..40 {
        // Once this one has a group of 32, the other one has fewer groups.
        let stream = clock.by(client.open(UPSTREAM)).await.unwrap();
        assert_eq!(stream.endpoint().address, opens.address);
        streams.push(stream);
    }
    assert!(client.totals().streams_refused >= 4, "{:?}", client.totals());

    opens.to_connect.send_replace(NO);
    let begun = Instant::now();
    refused(&clock, &client, StatusCode::UNAUTHORIZED).await;
    assert!(begun.elapsed() < Duration::from_secs(1), "{:?}", begun.elapsed());
}

#[tokio::test]
async fn a_gateway_that_leaves_a_stream_unanswered_takes_a_third_of_its_time_and_none_of_the_next_ones() {
    let clock = Clock::new();
    let silent = Scripted::start(Answer::Never, StatusCode::NO_CONTENT).await;
    let opens = Scripted::start(OPENS, StatusCode::NO_CONTENT).await;
    let client = client_of_all([&silent, &opens]);
    clock.until("both asked", || silent.options() == 1 && opens.options() == 1).await;
    let (mut streams, mut late) = (Vec::new(), Vec::new());
    for _ in 0..40 {
        // Once the other one has a group of 32, this one has fewer groups.
        let begun = Instant::now();
        let stream = clock.by(client.open(UPSTREAM)).await.unwrap();
        assert_eq!(stream.endpoint().address, opens.address);
        streams.push(stream);
        late.extend(Some(begun.elapsed()).filter(|&took| took > Duration::from_secs(1)));
    }
    assert!(late.len() == 1 && late[0] < Duration::from_secs(8), "{late:?}");
    silent.to_connect.send_replace(OPENS);
    clock.pass(MINUTE / 2).await;
    let stream = clock.by(client.open(UPSTREAM)).await.unwrap();
    assert_eq!(stream.endpoint().address, silent.address, "it has fewer groups of streams");
}

#[tokio::test]
async fn streams_go_first_to_gateways_that_accept_us() {
    let clock = Clock::new();
    let (refuses, opens) = (
        Scripted::start(NO, StatusCode::UNAUTHORIZED).await,
        Scripted::start(OPENS, StatusCode::NO_CONTENT).await,
    );
    let client = client_of_all([&refuses, &opens]);
    let said = |client: &Client| {
        client.status().iter().filter(|tunnel| tunnel.identity != IdentityState::Unknown).count()
    };
    clock.until("both have said", || said(&client) == 2).await;
    let mut streams = Vec::new();
    for _ in 0..5 {
        streams.push(clock.by(client.open(UPSTREAM)).await.unwrap());
    }
    assert_eq!(client.totals().streams_refused, 0);
}

#[tokio::test]
async fn a_retired_tunnel_shows_new_tokens_while_it_has_streams_and_closes_after_the_last() {
    let clock = Clock::new();
    let gateway = Scripted::start(OPENS, StatusCode::NO_CONTENT).await;
    let client = client_of(&gateway);
    clock.until("accepted", || is_accepted(&client)).await;
    let stream = clock.by(client.open(UPSTREAM)).await.unwrap();
    client.certificate_changed();
    clock
        .until("retired", || {
            tunnels(&client, TunnelState::Draining) == 1 && tunnels(&client, TunnelState::Live) == 1
        })
        .await;
    clock.until("the successor asked", || gateway.options() == 2).await;
    for asked in [4, 6] {
        client.token_changed();
        clock.until("shown on both", || gateway.options() == asked).await;
    }
    // To be asked about us again and again keeps no tunnel up.
    gateway.to_options.send_replace(StatusCode::UNAUTHORIZED);
    client.token_changed();
    clock.until("asked again and again", || gateway.options() > 20).await;
    assert_eq!(tunnels(&client, TunnelState::Draining), 1);
    drop(stream);
    let ended = Instant::now();
    clock.until("closed", || client.status().len() == 1).await;
    assert!(ended.elapsed() < Duration::from_secs(1), "{:?}", ended.elapsed());
}
