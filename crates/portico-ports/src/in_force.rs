//! Rules in force, and how they differ from those that a role needs.
//!
//! Each file of this folder reads one form into chains of steps. A packet is judged as the firewall would:
//! step by step, chain by chain. A flow that is needed and refused is missing. A flow that a step accepts
//! beyond all needs is needless. A step with a match that is not understood is skipped and reported, never
//! guessed at.

mod aws;
mod chains;
mod compare;
mod iptables;
mod nft;

use thiserror::Error;

pub use chains::InForce;
pub use compare::{Comparison, MissingRule, NeedlessRule, compare};

/// Why rules cannot be read.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum ReadError {
    /// It is none of the forms that are read.
    #[error(
        "this is neither `nft -j list ruleset`, nor iptables-save, nor `aws ec2 describe-security-groups`; \
         give what one of them prints"
    )]
    Unknown,
    /// nftables as text.
    #[error("this is nftables as text; give what `nft -j list ruleset` prints (JSON)")]
    NftText,
    /// JSON that is none.
    #[error("line {line}: {message}")]
    Json {
        /// The line.
        line: usize,
        /// What is wrong.
        message: String,
    },
}

impl InForce {
    /// Reads what `nft -j`, `iptables-save`, `ip6tables-save` or `aws ec2 describe-security-groups` printed.
    ///
    /// # Errors
    /// If it is none of them, or broken.
    pub fn read(text: &str) -> Result<Self, ReadError> {
        let trimmed = text.trim_start();
        if trimmed.starts_with('{') {
            let value: serde_json::Value = serde_json::from_str(trimmed)
                .map_err(|error| ReadError::Json { line: error.line(), message: error.to_string() })?;
            if let Some(entries) = value["nftables"].as_array() {
                return Ok(nft::read(entries));
            }
            return match value["SecurityGroups"].as_array() {
                Some(groups) => Ok(aws::read(groups)),
                None => Err(ReadError::Unknown),
            };
        }
        if text.lines().any(|line| line.trim() == "*filter") {
            return Ok(iptables::read(text));
        }
        let is_nft = trimmed.lines().any(|line| line.starts_with("table ") && line.trim_end().ends_with('{'));
        Err(if is_nft { ReadError::NftText } else { ReadError::Unknown })
    }
}

#[cfg(test)]
#[path = "in_force/tests.rs"]
mod tests;
