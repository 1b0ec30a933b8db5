//! Flags of both upstream programs that nothing here needs: accepted, and without effect.

use clap::Args;

use super::flag_values::switch;

// What either upstream program takes.
#[derive(Debug, Args)]
pub(super) struct CommonIgnoredFlags {
    /// Without effect: bytes are counted, not packets; see --connection-buffer
    #[arg(long, hide = true)]
    xfr_channel_size: Option<u32>,
    /// Without effect: see --connection-buffer
    #[arg(long, hide = true, num_args = 0..=1, require_equals = true, default_missing_value = "true",
        value_parser = switch)]
    warn_on_channel_limit: Option<bool>,
    /// Without effect: JSON is spoken
    #[arg(long, hide = true)]
    kube_api_content_type: Option<String>,
    /// Without effect: there is no Go runtime to profile
    #[arg(long, hide = true, num_args = 0..=1, require_equals = true, default_missing_value = "true",
        value_parser = switch)]
    enable_profiling: Option<bool>,
    /// Without effect
    #[arg(long, hide = true, num_args = 0..=1, require_equals = true, default_missing_value = "true",
        value_parser = switch)]
    enable_contention_profiling: Option<bool>,
}

impl CommonIgnoredFlags {
    /// Says which of these flags, and of `more` of one program, are given.
    pub(super) fn hint(&self, more: &[(&'static str, bool)]) {
        let both = [
            ("--xfr-channel-size", self.xfr_channel_size.is_some()),
            ("--warn-on-channel-limit", self.warn_on_channel_limit == Some(true)),
            ("--kube-api-content-type", self.kube_api_content_type.is_some()),
            ("--enable-profiling", self.enable_profiling == Some(true)),
            ("--enable-contention-profiling", self.enable_contention_profiling == Some(true)),
        ];
        let given: Vec<&str> =
            both.iter().chain(more).filter_map(|&(flag, is_given)| is_given.then_some(flag)).collect();
        if !given.is_empty() {
            let flags = given.join(" ");
            tracing::info!(%flags, "accepted for upstream's sake, and without effect");
        }
    }
}
