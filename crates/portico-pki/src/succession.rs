//! An authority and its successor, so that its trust bundle never has to be changed in a hurry.
//!
//! A year before an authority ends, its successor is made. It signs nothing yet, but whatever trusts the
//! bundle ([`Succession::trusted`]) trusts it from then on. Half a year before the end it takes over. The
//! former one stays in the bundle until it ends, for what it signed.

use jiff::{SignedDuration, Timestamp};

use crate::authority::{Authority, IssueError};
use crate::certificate;
use crate::pair::{KeyKind, Pair};
use crate::profile::LIFETIME;

/// A successor is made when less than this is left.
const ANNOUNCED: SignedDuration = LIFETIME;

/// It takes over when less than this is left.
const SUCCEEDED: SignedDuration = SignedDuration::from_hours(182 * 24);

/// It was announced for at least this long by then: agents that were away have fetched the bundle. An
/// authority that has ended is not waited for.
const NOTICE: SignedDuration = SignedDuration::from_hours(30 * 24);

/// An authority, the one that follows it, and the one before.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Succession {
    /// What signs.
    pub current: Pair,
    /// What will sign, once it is announced.
    pub next: Option<Pair>,
    /// The certificate of what signed before.
    pub former: Option<String>,
}

/// A step of a succession. The text goes into an Event.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Step {
    /// The successor was made.
    #[error("its successor is made and announced; it signs from half a year before the end on")]
    Announced,
    /// The successor signs from now on.
    #[error("its successor has taken over")]
    Succeeded,
    /// The former one has ended.
    #[error("the former one has ended, and is trusted no more")]
    Forgotten,
}

impl Succession {
    /// A new authority without a past.
    pub fn first(common_name: &str, now: Timestamp) -> Result<Self, IssueError> {
        let current = Authority::create(common_name, KeyKind::default(), now)?;
        Ok(Self { current, next: None, former: None })
    }

    /// Takes the step that is due, if one is. An authority that cannot be read stays as it is.
    pub fn advance(&mut self, common_name: &str, now: Timestamp) -> Result<Option<Step>, IssueError> {
        if self
            .former
            .as_deref()
            .is_some_and(|former| left(former, now).is_none_or(|left| left.is_negative()))
        {
            self.former = None;
            return Ok(Some(Step::Forgotten));
        }
        let Some(left_now) = left(&self.current.certificate, now).filter(|&left| left < ANNOUNCED) else {
            return Ok(None);
        };
        let usable = |next: &Pair| Authority::read(next, now).is_ok();
        let Some(next) = self.next.take_if(|next| usable(next)) else {
            self.next = Some(Authority::create(common_name, KeyKind::default(), now)?);
            return Ok(Some(Step::Announced));
        };
        let announced = starts(&next.certificate).is_some_and(|since| now.duration_since(since) >= NOTICE);
        if left_now.is_negative() || left_now < SUCCEEDED && announced {
            let former = std::mem::replace(&mut self.current, next);
            self.former = Some(former.certificate);
            return Ok(Some(Step::Succeeded));
        }
        self.next = Some(next);
        Ok(None)
    }

    /// The trust bundle: all of their certificates.
    pub fn trusted(&self) -> String {
        let others = self.next.iter().map(|next| &next.certificate).chain(&self.former);
        // One that somebody restored may have no last line break, and two on one line cannot be read.
        others.fold(self.current.certificate.clone(), |bundle, certificate| {
            format!("{}\n{certificate}", bundle.trim_end())
        })
    }
}

/// When the first certificate of a PEM text ends.
pub fn ends(text: &str) -> Option<Timestamp> {
    validity(text).map(|(_, end)| end)
}

fn starts(text: &str) -> Option<Timestamp> {
    validity(text).map(|(from, _)| from)
}

fn left(text: &str, now: Timestamp) -> Option<SignedDuration> {
    ends(text).map(|end| end.duration_since(now))
}

fn validity(text: &str) -> Option<(Timestamp, Timestamp)> {
    let (der, _) = certificate::first(text).ok()?;
    certificate::parse(&der).ok().map(|parsed| certificate::validity(&parsed))
}
