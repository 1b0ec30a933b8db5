//! etcd's JSON gateway (`/v3/...`), which each member serves beside gRPC, with the same certificates.
//!
//! Each call has a connection of its own: they are rare, and a certificate that was renewed is read.

use std::time::Duration;

use anyhow::{Context, bail, ensure};
use base64::Engine;
use futures_util::future::join_all;
use http::header::{CONTENT_TYPE, HOST};
use http::{Request, StatusCode};
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Bytes;
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use portico_dial::{ClientTls, ClientTlsFiles, Dialer, Target};
use serde_json::{Value, json};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::task::JoinSet;
use tokio::time::timeout;

use super::join::{Answer, Member};
use super::maintenance::{Alarm, MemberStatus};

/// For a question. A member that starts answers none, and the caller has something else to do.
const QUESTION: Duration = Duration::from_secs(1);

/// For a change of the ring, which takes a majority.
const CHANGE: Duration = Duration::from_secs(10);

/// For work on a whole database: gigabytes on a slow disk.
const WORK: Duration = Duration::from_secs(300);

/// Longest answer read.
const MAX_ANSWER: usize = 256 * 1_024;

/// A client of all members.
#[derive(Debug)]
pub(crate) struct Client {
    endpoints: Vec<Endpoint>,
    tls: Option<ClientTlsFiles>,
    dialer: Dialer,
}

#[derive(Debug)]
struct Endpoint {
    url: String,
    target: Target,
    tls: bool,
}

impl Client {
    pub(crate) fn new(urls: &[String], tls: Option<ClientTlsFiles>) -> anyhow::Result<Self> {
        let endpoints = urls.iter().map(|url| Endpoint::of(url)).collect::<anyhow::Result<_>>()?;
        Ok(Self { endpoints, tls, dialer: Dialer::direct() })
    }

    /// The members of the ring, if one of them knows a leader. The list is as of now: it takes a majority.
    pub(crate) async fn members(&self) -> Answer {
        let answers = join_all(self.endpoints.iter().map(|endpoint| self.members_at(endpoint))).await;
        Answer(answers.into_iter().find_map(Result::ok))
    }

    async fn members_at(&self, endpoint: &Endpoint) -> anyhow::Result<Vec<Member>> {
        // Where there is no leader the list would come only after seven seconds, as a refusal.
        let status = self.call(endpoint, "maintenance/status", &json!({}), QUESTION).await?;
        ensure!(number(&status["leader"]) > 0, "no leader");
        let list = self.call(endpoint, "cluster/member/list", &json!({"linearizable": true}), CHANGE).await?;
        let members = list["members"].as_array().context("no list of members")?;
        Ok(members.iter().map(member).collect())
    }

    /// Takes a member from the ring.
    pub(crate) async fn remove(&self, id: u64) -> anyhow::Result<()> {
        self.any("cluster/member/remove", &json!({"ID": id.to_string()})).await
    }

    /// Adds a member that does not vote.
    pub(crate) async fn add(&self, peer_url: &str) -> anyhow::Result<()> {
        self.any("cluster/member/add", &json!({"peerURLs": [peer_url], "isLearner": true})).await
    }

    /// Lets a member vote. Refused while it has not caught up.
    pub(crate) async fn promote(&self, id: u64) -> anyhow::Result<()> {
        self.any("cluster/member/promote", &json!({"ID": id.to_string()})).await
    }

    /// How it stands with a member, and with the alarms of the ring as it knows them.
    pub(crate) async fn seen(&self, url: &str) -> anyhow::Result<(MemberStatus, Vec<Alarm>)> {
        let endpoint = self.endpoint(url)?;
        let status = self.call(endpoint, "maintenance/status", &json!({}), QUESTION).await?;
        let of = |field: &str| number(&status[field]);
        let header = &status["header"];
        let seen = MemberStatus {
            url: url.to_owned(),
            id: number(&header["member_id"]),
            leader: of("leader"),
            is_learner: status["isLearner"] == true,
            size: of("dbSize"),
            in_use: of("dbSizeInUse"),
            quota: of("dbSizeQuota"),
            revision: number(&header["revision"]),
        };
        // No alarm, no second question.
        if status["errors"].as_array().is_none_or(Vec::is_empty) {
            return Ok((seen, Vec::new()));
        }
        let answer = self.call(endpoint, "maintenance/alarm", &json!({"action": "GET"}), CHANGE).await?;
        let alarms = answer["alarms"]
            .as_array()
            .into_iter()
            .flatten()
            .map(|alarm| Alarm { member: number(&alarm["memberID"]), is_full: alarm["alarm"] == "NOSPACE" });
        Ok((seen, alarms.collect()))
    }

    /// Whether a member can say what the ring has agreed on.
    pub(crate) async fn reads(&self, url: &str) -> anyhow::Result<()> {
        // Any key: there need not be one.
        let key = base64::engine::general_purpose::STANDARD.encode("health");
        self.call(self.endpoint(url)?, "kv/range", &json!({"key": key}), CHANGE).await.map(drop)
    }

    /// Forgets what was before this revision, and frees its pages within the file.
    pub(crate) async fn compact(&self, url: &str, revision: u64) -> anyhow::Result<()> {
        let body = json!({"revision": revision.to_string(), "physical": true});
        match self.call(self.endpoint(url)?, "kv/compaction", &body, WORK).await {
            // By somebody else.
            Err(error) if format!("{error:#}").contains("has been compacted") => Ok(()),
            done => done.map(drop),
        }
    }

    /// Writes a member's file anew without its free pages.
    pub(crate) async fn defragment(&self, url: &str) -> anyhow::Result<()> {
        self.call(self.endpoint(url)?, "maintenance/defragment", &json!({}), WORK).await.map(drop)
    }

    /// Ends an alarm.
    pub(crate) async fn disarm(&self, url: &str, alarm: Alarm) -> anyhow::Result<()> {
        let member = alarm.member.to_string();
        let body = json!({"action": "DEACTIVATE", "memberID": member, "alarm": alarm.name()});
        self.call(self.endpoint(url)?, "maintenance/alarm", &body, CHANGE).await.map(drop)
    }

    /// The members' URLs.
    pub(crate) fn urls(&self) -> impl Iterator<Item = &str> {
        self.endpoints.iter().map(|endpoint| &*endpoint.url)
    }

    /// Makes the call at one member after the other, until one succeeds.
    async fn any(&self, path: &str, body: &Value) -> anyhow::Result<()> {
        let mut last = None;
        for endpoint in &self.endpoints {
            match self.call(endpoint, path, body, CHANGE).await {
                Ok(_) => return Ok(()),
                Err(error) => last = Some(error),
            }
        }
        last.map_or(Ok(()), Err)
    }

    fn endpoint(&self, url: &str) -> anyhow::Result<&Endpoint> {
        let found = self.endpoints.iter().find(|endpoint| endpoint.url == url);
        found.with_context(|| format!("{url} is none of --endpoints"))
    }

    async fn call(
        &self,
        endpoint: &Endpoint,
        path: &str,
        body: &Value,
        limit: Duration,
    ) -> anyhow::Result<Value> {
        let what = || format!("asking etcd at {} for {path}", endpoint.url);
        let answered = timeout(limit, self.post(endpoint, path, body)).await;
        answered
            .with_context(|| format!("no answer within {limit:?}"))
            .and_then(|done| done)
            .with_context(what)
    }

    async fn post(&self, endpoint: &Endpoint, path: &str, body: &Value) -> anyhow::Result<Value> {
        let socket = self.dialer.connect_any(&endpoint.target).await?;
        if !endpoint.tls {
            return exchange(socket, endpoint, path, body).await;
        }
        let files = self.tls.clone().context("https needs --cert-file, --key-file and --trusted-ca-file")?;
        let tls = ClientTls::etcd(files)?.connect(&endpoint.target.host, socket).await?;
        exchange(tls, endpoint, path, body).await
    }
}

impl Endpoint {
    fn of(url: &str) -> anyhow::Result<Self> {
        let (tls, rest) = match url.split_once("://") {
            Some(("https", rest)) => (true, rest),
            Some(("http", rest)) => (false, rest),
            _ => bail!("{url} is no URL of etcd: write https://HOST:PORT"),
        };
        let target = rest.trim_end_matches('/').parse().with_context(|| format!("the URL {url}"))?;
        Ok(Self { url: url.to_owned(), target, tls })
    }
}

async fn exchange(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    endpoint: &Endpoint,
    path: &str,
    body: &Value,
) -> anyhow::Result<Value> {
    let request: Request<Full<Bytes>> = Request::post(format!("/v3/{path}"))
        .header(HOST, endpoint.target.to_string())
        .header(CONTENT_TYPE, "application/json")
        .body(Full::from(body.to_string()))?;
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
    // Ended with this future.
    let mut driver = JoinSet::new();
    driver.spawn(connection);
    let response = sender.send_request(request).await?;
    let status = response.status();
    let body = Limited::new(response.into_body(), MAX_ANSWER).collect().await;
    let body = body.map_err(|error| anyhow::anyhow!("its answer: {error}"))?.to_bytes();
    let answer: Value = serde_json::from_slice(&body).unwrap_or_default();
    let said = || answer["message"].as_str().unwrap_or("without a reason").to_owned();
    ensure!(status == StatusCode::OK, "{status}: {}", said());
    Ok(answer)
}

fn member(value: &Value) -> Member {
    let texts = |field: &str| -> Vec<String> {
        value[field].as_array().into_iter().flatten().filter_map(Value::as_str).map(str::to_owned).collect()
    };
    Member {
        id: number(&value["ID"]),
        name: value["name"].as_str().unwrap_or_default().to_owned(),
        peer_urls: texts("peerURLs"),
        started: !texts("clientURLs").is_empty(),
    }
}

/// Numbers of 64 bits are text in JSON, and left out if they are zero.
fn number(value: &Value) -> u64 {
    value.as_str().and_then(|text| text.parse().ok()).or(value.as_u64()).unwrap_or_default()
}
