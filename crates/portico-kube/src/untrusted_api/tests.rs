use std::net::TcpListener;

use portico_dial::{ProxyFiles, ProxySetting};
use portico_lab::hostile_api::{ENDLESS, HostileApi};
use portico_lab::pki::Authority;
use portico_lab::refusing::Refusing;
use portico_pki::{Credential, Kubeconfig};

use super::*;

const PATH: &str = "/api/v1/namespaces/default";

fn kubeconfig(server: &str, ca: &Authority) -> String {
    let credential = Credential::Token("secret".into());
    Kubeconfig { cluster: "a".into(), server: server.into(), authority: ca.cert(), credential }.to_yaml()
}

async fn ask(server: &str, ca: &Authority) -> Result<Option<Value>, UntrustedApiError> {
    UntrustedApi::new(&kubeconfig(server, ca), Dialer::direct()).await.unwrap().get(PATH).await
}

async fn error_of(api: &HostileApi) -> UntrustedApiError {
    ask(&api.url("127.0.0.1"), api.authority()).await.unwrap_err()
}

#[tokio::test]
async fn an_answer_without_end_is_given_up() {
    let head = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n{";
    let api = HostileApi::start(head, true).unwrap();
    let error = error_of(&api).await;
    assert!(matches!(error, UntrustedApiError::TooLong(_)), "{error}");
    assert!(api.sent() < ENDLESS / 10, "{} bytes were taken", api.sent());
}

#[tokio::test]
async fn an_answer_of_many_values_is_not_made_a_tree() {
    let answer = |values: usize| {
        let text = format!("{{\"a\":[0{}]}}", ",0".repeat(values));
        &*format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n{text}", text.len()).leak()
    };
    let error = error_of(&HostileApi::start(answer(MOST_VALUES), false).unwrap()).await;
    assert!(matches!(error, UntrustedApiError::TooLong(_)), "{error}");
    let api = HostileApi::start(answer(MOST_VALUES / 2), false).unwrap();
    assert!(ask(&api.url("127.0.0.1"), api.authority()).await.unwrap().is_some());
}

#[tokio::test]
async fn a_list_of_long_lines_is_given_up() {
    let name = "a".repeat(60_000);
    let table = json!({"metadata": {"continue": "again"}, "columnDefinitions": [{"name": "Name"}],
        "rows": [{"cells": [name]}]})
    .to_string();
    let answer = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n{table}", table.len()).leak();
    let api = HostileApi::start(answer, false).unwrap();
    let kubeconfig = kubeconfig(&api.url("127.0.0.1"), api.authority());
    let api = UntrustedApi::new(&kubeconfig, Dialer::direct()).await.unwrap();
    let found = api.rows(PATH, ["Name"], 1, 8).await.unwrap();
    assert!(found.rows.len() == 8 && found.more, "{} lines", found.rows.len());
    let error = api.rows(PATH, ["Name"], 1, 100).await.unwrap_err();
    assert!(matches!(error, UntrustedApiError::TooLong(_)), "{error}");
}

#[tokio::test]
async fn a_head_without_end_is_given_up() {
    let api = HostileApi::start("HTTP/1.1 200 OK\r\nx: ", true).unwrap();
    let error = error_of(&api).await;
    assert!(matches!(error, UntrustedApiError::Unreachable { .. }), "{error}");
    assert!(api.sent() < ENDLESS / 10, "{} bytes were taken", api.sent());
}

#[tokio::test]
async fn a_certificate_must_be_that_of_the_kubeconfig() {
    let api = HostileApi::start("HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}", false).unwrap();
    let other = Authority::new("hostile").unwrap();
    let error = ask(&api.url("127.0.0.1"), &other).await.unwrap_err().to_string();
    assert!(error.contains("certificate"), "{error}");
    // A dot at the end of a name is for DNS alone; certificates have none.
    for host in ["127.0.0.1", "localhost", "localhost."] {
        assert_eq!(ask(&api.url(host), api.authority()).await.unwrap(), Some(json!({})), "{host}");
    }
}

#[tokio::test]
async fn what_it_says_is_short_and_on_one_line() {
    let answer = "HTTP/1.1 500 No\r\ncontent-length: 32\r\n\r\n{\"message\": \"no\\n\\u001b[31mway\"}";
    let error = error_of(&HostileApi::start(answer, false).unwrap()).await;
    assert_eq!(error.to_string(), format!("GET {PATH}: it answered 500: no  [31mway"));
    assert_eq!(quoted(&"ä".repeat(1_000)).chars().count(), QUOTED + 1);
    let answer = "HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nhaha";
    let error = error_of(&HostileApi::start(answer, false).unwrap()).await;
    assert!(matches!(error, UntrustedApiError::Unreadable(_)), "{error}");
}

#[tokio::test]
async fn a_server_is_ready_if_it_says_so_in_whatever_words() {
    let ready = async |answer: &'static str| {
        let api = HostileApi::start(answer, false).unwrap();
        let kubeconfig = kubeconfig(&api.url("127.0.0.1"), api.authority());
        UntrustedApi::new(&kubeconfig, Dialer::direct()).await.unwrap().ready().await
    };
    ready("HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok").await.unwrap();
    let no = "HTTP/1.1 500 No\r\ncontent-length: 12\r\n\r\n[+]a\n[-]etcd";
    let error = ready(no).await.unwrap_err().to_string();
    assert_eq!(error, "GET /readyz: it answered 500: [+]a [-]etcd");
}

#[tokio::test(start_paused = true)]
async fn a_server_that_says_nothing_is_given_up() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("https://{}", listener.local_addr().unwrap());
    let error = ask(&url, &Authority::new("mute").unwrap()).await.unwrap_err();
    assert!(
        matches!(error, UntrustedApiError::Unreachable { .. } | UntrustedApiError::NoAnswer(_)),
        "{error}"
    );
}

#[test]
fn an_object_is_ours_if_portico_applied_it() {
    let entry = |manager: &str, operation: &str| json!({"manager": manager, "operation": operation});
    let object = |entries: Value| json!({"metadata": {"managedFields": entries}});
    let ours = |value: &Value| managers(value).iter().any(is_ours);
    assert!(ours(&object(json!([entry("kubectl", "Update"), entry("portico", "Apply")]))));
    assert!(!ours(&object(json!([entry("portico", "Update"), entry("kubectl", "Apply")]))));
    assert!(!ours(&object(Value::Null)));
    assert_eq!(last_writer(&managers(&object(json!([entry("a\nb", "Update")])))), "a b");
}

#[tokio::test]
async fn a_server_that_is_no_host_and_port_is_refused_at_once_and_no_password_in_it_is_reported() {
    let authority = Authority::new("a").unwrap();
    for server in ["https://:443", "https://a:99999", "https://me:secret@a:443"] {
        let refused =
            UntrustedApi::new(&kubeconfig(server, &authority), Dialer::direct()).await.err().unwrap();
        let text = crate::error::describe(&refused);
        assert!(text.contains("the server in the kubeconfig") && !text.contains("secret"), "{text}");
    }
}

#[tokio::test]
async fn a_proxy_of_the_dialer_is_used() {
    let refusing = Refusing::start().unwrap();
    let dead = refusing.address();
    let proxy = format!("http://{dead}").parse::<ProxySetting>().unwrap();
    let dialer = Dialer::with_environment(proxy, ProxyFiles::default(), |_| None).unwrap();
    let api = HostileApi::start("HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}", false).unwrap();
    let kubeconfig = kubeconfig(&api.url("localhost"), api.authority());
    let error = UntrustedApi::new(&kubeconfig, dialer).await.unwrap().get(PATH).await.unwrap_err();
    assert!(error.to_string().contains(&format!("proxy http://{dead}")), "{error}");
}

#[tokio::test]
async fn a_watch_ends_with_the_first_news_or_with_its_time_and_a_list_without_end_is_given_up() {
    const LIST: &str = "/api/v1/nodes?limit=1";
    let way = async |api: &HostileApi| {
        let kubeconfig = kubeconfig(&api.url("127.0.0.1"), api.authority());
        UntrustedApi::new(&kubeconfig, Dialer::direct()).await.unwrap()
    };
    let flood = HostileApi::start("HTTP/1.1 200 OK\r\n\r\n{", true).unwrap();
    way(&flood).await.changed(LIST, LONGEST_WATCH).await.unwrap();
    let error = way(&flood).await.rows(LIST, ["Name"], 1, 1).await.unwrap_err();
    assert!(matches!(error, UntrustedApiError::TooLong(_)), "{error}");
    assert!(flood.sent() < ENDLESS / 10, "{} bytes were taken", flood.sent());
    let quiet = HostileApi::start("HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n", false).unwrap();
    way(&quiet).await.changed(LIST, Duration::from_millis(100)).await.unwrap();
    let refuses = HostileApi::start("HTTP/1.1 403 No\r\ncontent-length: 2\r\n\r\n{}", false).unwrap();
    let error = way(&refuses).await.changed(LIST, LONGEST_WATCH).await.unwrap_err().to_string();
    assert_eq!(error, "watch /api/v1/nodes: it answered 403: no watch");
}
