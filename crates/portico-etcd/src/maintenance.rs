//! The needs of a running ring: space given back, an alarm ended, a learner that votes.
//!
//! The launcher beside the leader decides for all, so that one member at a time is defragmented, which
//! answers nobody meanwhile. [`wanted`] is pure; [`run`] asks, does one thing, and looks again. What failed
//! is left alone for a while ([`Failures`]).

use std::convert::Infallible;
use std::fmt;
use std::time::Duration;

use tokio::time::{Instant, sleep};
use tracing::{debug, error, info, warn};

use super::client::Client;

/// Between a thing that was done and the next look: there may be more.
const SOON: Duration = Duration::from_secs(1);

/// The longest pause after a defragmentation that failed. A full disk stays full until somebody acts.
const LONGEST_PAUSE: Duration = Duration::from_hours(1);

/// The same while the database is full. It takes no writes before its space is given back.
const LONGEST_PAUSE_WHEN_FULL: Duration = Duration::from_mins(1);

/// How it stands with a member.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct MemberStatus {
    pub(crate) url: String,
    pub(crate) id: u64,
    /// The member that it takes for the leader; 0 for none.
    pub(crate) leader: u64,
    pub(crate) is_learner: bool,
    /// Bytes of its file.
    pub(crate) size: u64,
    /// Bytes of the file that are in use.
    pub(crate) in_use: u64,
    /// The size above which it takes no more writes.
    pub(crate) quota: u64,
    pub(crate) revision: u64,
}

/// An alarm, until somebody ends it. A member that leaves the ring leaves its alarm behind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Alarm {
    /// 0 where etcd cannot tell whose data is right.
    pub(crate) member: u64,
    /// NOSPACE; another one is CORRUPT.
    pub(crate) is_full: bool,
}

/// One thing to do.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Act {
    /// Lets this member vote.
    Promote(u64),
    /// Forgets what was before this revision.
    Compact(u64),
    /// Gives the free space of this member back.
    Defragment(String),
    /// Ends an alarm.
    Disarm(Alarm),
}

/// What was seen and done before.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Before {
    /// The revision of a look that is at least as long ago as the time between two.
    revision: u64,
    compacted: u64,
    /// The revision of a later look, and when that was.
    later: Option<(u64, Instant)>,
}

/// What failed, and is left alone for a while. Even a defragmentation that fails stops its member for as long
/// as it takes.
#[derive(Debug, Default)]
struct Failures(Vec<Failure>);

#[derive(Debug)]
struct Failure {
    act: Act,
    at: Instant,
    pause: Duration,
}

/// What `own` is to do, the most urgent first; `None` while that cannot be said. `others` are all other
/// members that were asked, `None` one that is not healthy. `ring` are the members of the ring as a majority
/// says, where one has other data than the rest.
fn wanted(
    own: &MemberStatus,
    others: &[Option<MemberStatus>],
    ring: Option<&[u64]>,
    alarms: &[Alarm],
    before: Before,
) -> Option<Vec<Act>> {
    if own.is_learner {
        return Some(vec![Act::Promote(own.id)]);
    }
    if own.leader != own.id {
        return None;
    }
    let mut corrupt = alarms.iter().filter(|alarm| !alarm.is_full).peekable();
    if corrupt.peek().is_some() {
        // What to do with a member only people can say. Once it is gone, its data is. Until this alarm ends
        // etcd answers nobody, so nobody is healthy.
        let ring = ring?;
        let left = corrupt.filter(|alarm| alarm.member != 0 && !ring.contains(&alarm.member));
        return Some(left.map(|alarm| Act::Disarm(*alarm)).collect());
    }
    let is_whole = |seen: &&MemberStatus| seen.leader == own.id && !seen.is_learner;
    let healthy: Vec<&MemberStatus> = others.iter().flatten().filter(is_whole).collect();
    if healthy.len() < others.len() {
        return None;
    }
    // The leader is last: while it is busy there are no writes.
    let members = healthy.into_iter().chain([own]);
    let defragment = |seen: &MemberStatus| Act::Defragment(seen.url.clone());
    let Some(alarm) = alarms.first() else {
        return Some(members.filter(|seen| seen.is_mostly_free()).map(defragment).collect());
    };
    // API servers compact by a write, which is refused now. No client that keeps up still reads what was the
    // present so long ago.
    let compact = (before.revision > before.compacted).then_some(Act::Compact(before.revision));
    let disarm = members.clone().all(MemberStatus::has_space).then_some(Act::Disarm(*alarm));
    let defragments = members.filter(|seen| seen.gets_space()).map(defragment);
    Some(compact.into_iter().chain(disarm).chain(defragments).collect())
}

impl Before {
    /// Looks follow each other sooner than `every` while there is something to do.
    fn note(&mut self, revision: u64, now: Instant, every: Duration) {
        let (later, at) = *self.later.get_or_insert((revision, now));
        if now.duration_since(at) >= every {
            self.revision = later;
            self.later = Some((revision, now));
        }
    }

    fn compacted(&mut self, revision: u64) {
        self.compacted = revision;
        // While writes go on there is always more to compact: what else is to be done comes in between.
        self.later = None;
    }
}

impl Failures {
    /// The first of these acts, all that are wanted, that is not left alone now. Forgets what failed and is
    /// not wanted any more, after its pause: what is wanted off and on is not tried more often for that.
    fn first_due(&mut self, acts: Vec<Act>, now: Instant, is_full: bool) -> Option<Act> {
        let is_due = |failure: &Failure| now >= failure.until(is_full);
        self.0.retain(|failure| !is_due(failure) || acts.iter().any(|act| failure.act.is_like(act)));
        acts.into_iter().find(|act| self.of(act).is_none_or(is_due))
    }

    fn of(&self, act: &Act) -> Option<&Failure> {
        self.0.iter().find(|failure| failure.act.is_like(act))
    }

    fn note(&mut self, act: Act, at: Instant, every: Duration) {
        let pause = match (&act, self.of(&act)) {
            (Act::Defragment(_), Some(last)) => (last.pause * 2).min(LONGEST_PAUSE),
            _ => every,
        };
        self.forget(&act);
        self.0.push(Failure { act, at, pause });
    }

    fn forget(&mut self, act: &Act) {
        self.0.retain(|failure| !failure.act.is_like(act));
    }
}

impl Failure {
    /// The end of its pause. An alarm may come in the middle of a long one.
    fn until(&self, is_full: bool) -> Instant {
        self.at + if is_full { self.pause.min(LONGEST_PAUSE_WHEN_FULL) } else { self.pause }
    }
}

impl Alarm {
    /// As etcd has it.
    pub(crate) fn name(self) -> &'static str {
        if self.is_full { "NOSPACE" } else { "CORRUPT" }
    }
}

impl MemberStatus {
    /// Half of a file of some size is nothing.
    fn is_mostly_free(&self) -> bool {
        self.size >= self.quota / 4 && self.in_use <= self.size / 2
    }

    /// Enough for an alarm that has ended not to come back with the next write.
    fn has_space(&self) -> bool {
        self.size <= self.quota / 10 * 9
    }

    /// Whether it would have space if its free pages were given back.
    fn gets_space(&self) -> bool {
        !self.has_space() && self.in_use <= self.quota / 10 * 8
    }
}

/// Looks after the ring, for ever.
pub(crate) async fn run(client: &Client, own: &str, every: Duration) -> Infallible {
    let (mut before, mut reported, mut failures) = (Before::default(), Vec::new(), Failures::default());
    loop {
        // One that does not answer starts, or ends. The probe of its health sees that.
        let acted = match client.seen(own).await {
            Ok((seen, alarms)) => {
                if alarms != reported {
                    tell(&seen, &alarms);
                    reported.clone_from(&alarms);
                }
                before.note(seen.revision, Instant::now(), every);
                look(client, &seen, &alarms, &mut before, &mut failures, every).await
            }
            Err(_) => true,
        };
        sleep(if acted { SOON.min(every) } else { every }).await;
    }
}

/// Does one thing, if there is one to do.
async fn look(
    client: &Client,
    own: &MemberStatus,
    alarms: &[Alarm],
    before: &mut Before,
    failures: &mut Failures,
    every: Duration,
) -> bool {
    let mut others = Vec::new();
    if own.leader == own.id {
        for url in client.urls().filter(|url| *url != own.url) {
            let healthy = client.reads(url).await.is_ok();
            others.push(client.seen(url).await.ok().filter(|_| healthy).map(|(seen, _)| seen));
        }
    }
    let members = if alarms.iter().all(|alarm| alarm.is_full) { None } else { client.members().await.0 };
    let ring: Option<Vec<u64>> = members.map(|members| members.iter().map(|member| member.id).collect());
    let Some(acts) = wanted(own, &others, ring.as_deref(), alarms, *before) else { return false };
    let is_full = alarms.iter().any(|alarm| alarm.is_full);
    let Some(act) = failures.first_due(acts, Instant::now(), is_full) else { return false };
    let done = act.perform(client, &own.url).await;
    if done.is_ok() {
        failures.forget(&act);
    }
    match (done, &act) {
        (Ok(()), Act::Compact(revision)) => before.compacted(*revision),
        (Ok(()), _) => info!("{act}: done"),
        // Until it has caught up.
        (Err(error), Act::Promote(_)) => debug!("{act}: {error:#}"),
        (Err(error), _) => {
            warn!("{act}: {error:#}; tried again later");
            failures.note(act, Instant::now(), every);
        }
    }
    true
}

impl fmt::Display for Act {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Promote(_) => f.write_str("letting this member vote"),
            Self::Compact(revision) => write!(f, "compacting to revision {revision}"),
            Self::Defragment(url) => write!(f, "defragmenting the member at {url}"),
            Self::Disarm(alarm) => {
                write!(f, "ending the alarm {} of member {:x}", alarm.name(), alarm.member)
            }
        }
    }
}

impl Act {
    /// Whether it fails for the same reasons as `other`. Each compaction is to another revision.
    fn is_like(&self, other: &Self) -> bool {
        matches!((self, other), (Self::Compact(_), Self::Compact(_))) || self == other
    }

    async fn perform(&self, client: &Client, own: &str) -> anyhow::Result<()> {
        match self {
            Self::Promote(id) => client.promote(*id).await,
            Self::Compact(revision) => client.compact(own, *revision).await,
            Self::Defragment(url) => client.defragment(url).await,
            Self::Disarm(alarm) => client.disarm(own, *alarm).await,
        }
    }
}

/// Says what an alarm means, and what to do, once.
fn tell(own: &MemberStatus, alarms: &[Alarm]) {
    let MemberStatus { size, in_use, quota, .. } = own;
    match alarms.first() {
        Some(alarm) if !alarm.is_full => error!(
            member = format_args!("{:x}", alarm.member),
            is_this = alarm.member == own.id,
            "CORRUPT: a member's data differs from that of the others, and etcd refuses everything; delete \
             its volume and its pod, and it gets all data from them. The only member, or member 0, which \
             stands for any: restore a backup"
        ),
        Some(_) => warn!(
            size,
            in_use,
            quota,
            "NOSPACE: the database is full, and etcd refuses writes; delete objects that nobody needs, or \
             raise spec.componentsOverride.etcd.quotaBackendGb"
        ),
        None => info!(size, in_use, quota, "no alarm any more: etcd takes writes"),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const QUOTA: u64 = 1_000;
    const FULL: Alarm = Alarm { member: 2, is_full: true };

    /// The first one leads.
    fn seen(id: u64, size: u64, in_use: u64) -> MemberStatus {
        let url = format!("http://{id}");
        MemberStatus { url, id, leader: 1, is_learner: false, size, in_use, quota: QUOTA, revision: 50 }
    }

    /// The most urgent act.
    fn next(
        own: &MemberStatus,
        others: &[Option<MemberStatus>],
        ring: Option<&[u64]>,
        alarms: &[Alarm],
        before: Before,
    ) -> Option<Act> {
        wanted(own, others, ring, alarms, before)?.into_iter().next()
    }

    fn after(revision: u64, compacted: u64) -> Before {
        Before { revision, compacted, later: None }
    }

    fn defragment(id: u64) -> Option<Act> {
        Some(Act::Defragment(format!("http://{id}")))
    }

    #[test]
    fn space_is_given_back_by_followers_first_and_only_where_it_is_worth_it() {
        let (large, small) = ([500, 100], [200, 10]);
        let of = |id, [size, in_use]: [u64; 2]| seen(id, size, in_use);
        let others = |second, third| [Some(of(2, second)), Some(of(3, third))];
        let next =
            |own, others: &[Option<MemberStatus>]| next(&of(1, own), others, None, &[], Before::default());
        assert_eq!(next(large, &others(small, large)), defragment(3));
        assert_eq!(next(large, &others(small, small)), defragment(1));
        assert_eq!(next(small, &others(small, [900, 800])), None);
        assert_eq!(next(large, &[]), defragment(1));
    }

    #[test]
    fn a_full_database_is_compacted_defragmented_and_ends_its_alarm() {
        let (full, freed) = (seen(1, 1_100, 300), seen(1, 320, 300));
        let next = |own: &MemberStatus, before| next(own, &[], None, &[FULL], before);
        assert_eq!(next(&full, after(40, 0)), Some(Act::Compact(40)));
        assert_eq!(next(&full, after(40, 40)), defragment(1));
        assert_eq!(next(&freed, after(40, 40)), Some(Act::Disarm(FULL)));
        // What is in use stays so until somebody deletes something.
        assert_eq!(next(&seen(1, 1_100, 950), after(40, 40)), None);
    }

    #[test]
    fn while_writes_go_on_a_full_database_is_compacted_to_what_is_old_and_gets_its_space_in_between() {
        let (every, start) = (Duration::from_secs(30), Instant::now());
        let mut before = Before::default();
        // A look a second, as after each act. Each finds another revision.
        let acts = (0..=92).map(|second| {
            let own = MemberStatus { revision: 100 + second, ..seen(1, 1_100, 300) };
            before.note(own.revision, start + Duration::from_secs(second), every);
            let act = next(&own, &[], None, &[FULL], before);
            if let Some(Act::Compact(revision)) = act {
                before.compacted(revision);
            }
            (second, act)
        });
        let (compacting, rest): (Vec<_>, Vec<_>) =
            acts.partition(|(_, act)| matches!(act, Some(Act::Compact(_))));
        let compact = |revision| Some(Act::Compact(revision));
        assert_eq!(compacting, [(30, compact(100)), (61, compact(131)), (92, compact(162))]);
        assert!(rest.iter().all(|(_, act)| *act == defragment(1)), "{rest:?}");
    }

    #[test]
    fn a_defragmentation_that_fails_comes_later_and_later_and_holds_up_no_other_act() {
        let (every, start) = (Duration::from_secs(30), Instant::now());
        let mut failures = Failures::default();
        let others = [Some(seen(2, 500, 100)), Some(seen(3, 500, 100))];
        // A look a second, as after each act. The disk of the second member is full.
        let mut failed = Vec::new();
        for second in 0..4 * 3_600 {
            let now = start + Duration::from_secs(second);
            let acts = wanted(&seen(1, 200, 10), &others, None, &[], Before::default()).unwrap();
            let act = failures.first_due(acts, now, false).unwrap();
            if Some(&act) == defragment(2).as_ref() {
                failed.push(second);
                failures.note(act, now, every);
            } else {
                assert_eq!(Some(act), defragment(3));
            }
        }
        assert_eq!(failed, [0, 30, 90, 210, 450, 930, 1_890, 3_810, 7_410, 11_010]);
        let act = Act::Defragment("http://2".to_owned());
        failures.forget(&act);
        assert_eq!(failures.first_due(vec![act.clone()], start, false), Some(act), "it was done meanwhile");
    }

    #[test]
    fn a_full_database_waits_a_minute_at_most_for_a_defragmentation_that_failed() {
        let (every, start) = (Duration::from_secs(30), Instant::now());
        let mut failures = Failures::default();
        let mut failed = Vec::new();
        // The disk has no space for the copy. After 4000 seconds, in a long pause, the database is full.
        for second in 0..4_200 {
            let now = start + Duration::from_secs(second);
            let full = second >= 4_000;
            let alarms = if full { &[FULL][..] } else { &[] };
            let acts = wanted(&seen(1, 1_100, 100), &[], None, alarms, after(40, 40)).unwrap();
            if let Some(act) = failures.first_due(acts, now, full) {
                failed.push(second);
                failures.note(act, now, every);
            }
        }
        assert_eq!(failed, [0, 30, 90, 210, 450, 930, 1_890, 3_810, 4_000, 4_060, 4_120, 4_180]);
    }

    #[test]
    fn what_failed_and_is_not_wanted_any_more_is_forgotten_after_its_pause() {
        let (every, start) = (Duration::from_secs(30), Instant::now());
        let mut failures = Failures::default();
        let act = Act::Defragment("http://2".to_owned());
        for second in [0, 30] {
            failures.note(act.clone(), start + Duration::from_secs(second), every);
        }
        let mut next = |second, is_wanted: bool| {
            let now = start + Duration::from_secs(second);
            let acts = is_wanted.then(|| act.clone()).into_iter().collect();
            let due = failures.first_due(acts, now, false);
            if let Some(act) = &due {
                failures.note(act.clone(), now, every);
            }
            due.is_some()
        };
        // Its pause ends at 90.
        assert!(!next(60, false));
        assert!(!next(61, true));
        assert!(!next(90, false));
        assert!(next(91, true));
        assert!(next(121, true), "after as long a pause as the first time");
    }

    #[test]
    fn a_compaction_that_fails_waits_for_the_next_look_and_space_is_given_back_meanwhile() {
        let (every, now) = (Duration::from_secs(30), Instant::now());
        let mut failures = Failures::default();
        let acts = |revision| wanted(&seen(1, 1_100, 300), &[], None, &[FULL], after(revision, 0)).unwrap();
        let compact = |revision| Some(Act::Compact(revision));
        for (times, revision) in (0..).zip(40..44) {
            let now = now + every * times;
            let due = failures.first_due(acts(revision), now, true);
            assert_eq!(due, compact(revision));
            failures.note(due.unwrap(), now, every);
            assert_eq!(failures.first_due(acts(revision + 1), now + SOON, true), defragment(1));
        }
    }

    #[test]
    fn a_learner_only_asks_to_vote() {
        let learner = MemberStatus { is_learner: true, ..seen(2, 1_100, 10) };
        assert_eq!(next(&learner, &[], None, &[FULL], after(40, 0)), Some(Act::Promote(2)));
    }

    #[test]
    fn a_corrupt_member_keeps_its_alarm_until_it_has_left_the_ring() {
        let corrupt = |member| Alarm { member, is_full: false };
        let next = |alarms: &[Alarm], ring: Option<&[u64]>| {
            next(&seen(1, 320, 300), &[None, None], ring, alarms, after(40, 0))
        };
        assert_eq!(next(&[corrupt(2)], Some(&[1, 2, 3])), None);
        assert_eq!(next(&[corrupt(2)], None), None);
        assert_eq!(next(&[FULL, corrupt(2)], Some(&[1, 4, 3])), Some(Act::Disarm(corrupt(2))));
        assert_eq!(next(&[corrupt(0)], Some(&[1, 4, 3])), None);
    }

    proptest! {
        #[test]
        fn nothing_is_done_by_followers_beside_one_that_is_not_healthy_or_with_corrupt_data(
            sizes in proptest::collection::vec((0..2_000_u64, 0..2_000_u64), 3),
            trouble in 0..4_u8,
            full in any::<bool>(),
            compacted in 0..60_u64,
        ) {
            let [mut own, second, mut third] = [0, 1, 2].map(|index| {
                let (size, in_use) = sizes[index];
                seen(index as u64 + 1, size, in_use.min(size))
            });
            let mut alarms = if full { vec![FULL] } else { Vec::new() };
            match trouble {
                0 => own.leader = 2,
                1 => third.leader = 0,
                2 => third.is_learner = true,
                _ => alarms.push(Alarm { member: 3, is_full: false }),
            }
            let (ring, before) = (Some(&[1, 2, 3][..]), after(50, compacted));
            let act = next(&own, &[Some(second.clone()), Some(third)], ring, &alarms, before);
            prop_assert_eq!(act, None);
            let away = next(&seen(1, 1_100, 10), &[Some(second), None], ring, &alarms, before);
            prop_assert_eq!(away, None);
        }
    }
}
