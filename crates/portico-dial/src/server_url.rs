//! `https://HOST:PORT`, as an administrator gives the address of an API server.

use http::Uri;

/// The URL without a slash at its end. `None` for what is no https, or has more than a host and a port:
/// a path, a query, a fragment, a user.
#[must_use]
pub fn server_url(text: &str) -> Option<String> {
    let uri: Uri = text.parse().ok()?;
    let leads_to_a_host =
        uri.scheme_str() == Some("https") && uri.host().is_some_and(|host| !host.is_empty());
    let is_alone = uri.path() == "/" && uri.query().is_none() && !text.contains(['@', '#']);
    (leads_to_a_host && is_alone).then(|| text.trim_end_matches('/').to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_is_an_url_of_a_host_alone() {
        for good in
            ["https://a.example.com:6443", "https://a.example.com:6443/", "https://[2001:db8::1]:6443"]
        {
            assert_eq!(server_url(good).unwrap(), good.trim_end_matches('/'));
        }
        for bad in [
            "",
            "a:6443",
            "http://a:6443",
            "https://a/b",
            "https://u@a",
            "https://a?b",
            "https://a#b",
            "https://",
        ] {
            assert_eq!(server_url(bad), None, "{bad}");
        }
    }
}
