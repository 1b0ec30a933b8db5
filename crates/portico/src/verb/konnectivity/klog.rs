//! Flags of upstream's logging library, which manifests pass: accepted, and without effect.

use clap::Args;

// What the upstream programs take for their log.
#[derive(Debug, Args)]
pub(super) struct KlogFlags {
    /// Without effect: RUST_LOG sets the level
    #[arg(long, short, hide = true, value_name = "LEVEL")]
    v: Option<String>,
    /// Without effect: RUST_LOG sets levels, also of single modules
    #[arg(long, hide = true)]
    vmodule: Option<String>,
    /// Without effect: logs go to standard error
    #[arg(long, hide = true, num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    logtostderr: Option<String>,
    /// Without effect: logs go to standard error
    #[arg(long, hide = true, num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    alsologtostderr: Option<String>,
    /// Without effect: logs go to standard error
    #[arg(long, hide = true)]
    alsologtostderrthreshold: Option<String>,
    /// Without effect: logs go to standard error
    #[arg(long, hide = true, num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    legacy_stderr_threshold_behavior: Option<String>,
    /// Without effect: logs go to standard error
    #[arg(long, hide = true)]
    stderrthreshold: Option<String>,
    /// Without effect: logs go to standard error
    #[arg(long, hide = true)]
    log_dir: Option<String>,
    /// Without effect: logs go to standard error
    #[arg(long, hide = true)]
    log_file: Option<String>,
    /// Without effect: logs go to standard error
    #[arg(long, hide = true)]
    log_file_max_size: Option<String>,
    /// Without effect
    #[arg(long, hide = true)]
    log_backtrace_at: Option<String>,
    /// Without effect: --log-format sets the form of lines
    #[arg(long, hide = true, num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    one_output: Option<String>,
    /// Without effect: --log-format sets the form of lines
    #[arg(long, hide = true, num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    skip_headers: Option<String>,
    /// Without effect: --log-format sets the form of lines
    #[arg(long, hide = true, num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    skip_log_headers: Option<String>,
    /// Without effect: --log-format sets the form of lines
    #[arg(long, hide = true, num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    add_dir_header: Option<String>,
}

impl KlogFlags {
    /// Says which flags have no effect, if there are any.
    pub(super) fn hint(&self) {
        let given: Vec<&str> = [
            ("--v", &self.v),
            ("--vmodule", &self.vmodule),
            ("--logtostderr", &self.logtostderr),
            ("--alsologtostderr", &self.alsologtostderr),
            ("--alsologtostderrthreshold", &self.alsologtostderrthreshold),
            ("--legacy-stderr-threshold-behavior", &self.legacy_stderr_threshold_behavior),
            ("--stderrthreshold", &self.stderrthreshold),
            ("--log-dir", &self.log_dir),
            ("--log-file", &self.log_file),
            ("--log-file-max-size", &self.log_file_max_size),
            ("--log-backtrace-at", &self.log_backtrace_at),
            ("--one-output", &self.one_output),
            ("--skip-headers", &self.skip_headers),
            ("--skip-log-headers", &self.skip_log_headers),
            ("--add-dir-header", &self.add_dir_header),
        ]
        .into_iter()
        .filter_map(|(flag, value)| value.as_ref().map(|_| flag))
        .collect();
        if !given.is_empty() {
            let flags = given.join(" ");
            tracing::info!(%flags, "without effect here: logs go to standard error; RUST_LOG sets the level");
        }
    }
}
