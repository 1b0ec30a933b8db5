//! `portico kubeconfig --as USER`: the user that the certificate is for, and for how long.

use std::time::Duration;

use clap::Args;
use portico_reach::personal::SHORTEST_LIFETIME;

use crate::args::positive_duration;

// The user that the credentials are for.
#[derive(Debug, Args)]
pub(super) struct Person {
    /// Have the cluster sign a certificate of this user, instead of handing out the stored credentials
    #[arg(long = "as", value_name = "USER", value_parser = name)]
    pub(super) user: Option<String>,
    /// A group of that user: RBAC binds rights to user or group
    #[arg(long, value_name = "GROUP", requires = "user", value_parser = name)]
    pub(super) group: Option<String>,
    /// How long that certificate is valid, at least 10m; the cluster may make it less
    #[arg(long = "for", value_name = "TIME", requires = "user", default_value = "8h")]
    #[arg(value_parser = lifetime)]
    pub(super) lifetime: Duration,
}

/// A user or group, as a certificate can name it.
fn name(text: &str) -> Result<String, String> {
    let fits = (1..=64).contains(&text.len()) && text.bytes().all(|byte| (b' '..=b'~').contains(&byte));
    if fits { Ok(text.to_owned()) } else { Err("give 1 to 64 letters of ASCII".to_owned()) }
}

fn lifetime(text: &str) -> Result<Duration, String> {
    match positive_duration(text)? {
        lifetime if lifetime < SHORTEST_LIFETIME => Err("Kubernetes signs for 10m or more".to_owned()),
        // The field has 32 bits.
        lifetime if i32::try_from(lifetime.as_secs()).is_err() => Err("that is too long".to_owned()),
        lifetime => Ok(lifetime),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_fits_into_a_certificate_and_a_lifetime_into_the_request() {
        for good in ["alice", "alice@example.com", "Alice B", "oidc:x"] {
            assert_eq!(name(good).as_deref(), Ok(good));
        }
        for bad in ["", "a\nb", "\u{1b}[0m", "ä", &"a".repeat(65)] {
            assert!(name(bad).is_err(), "{bad}");
        }
        assert_eq!(lifetime("10m"), Ok(SHORTEST_LIFETIME));
        assert!(lifetime("9m59s").is_err() && lifetime("0s").is_err() && lifetime("1000000h").is_err());
    }
}
