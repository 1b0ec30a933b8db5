//! What waits at the front Service, in the log and as Events, when it begins and when it ends.

use portico_expose::front::{FrontPlan, WhyWaiting};
use portico_kube::events::Severity;
use tracing::{info, warn};

/// Most waiting ports named in one text; `/status` has all of them.
const MAX_NAMED: usize = 5;

/// What was said last.
#[derive(Debug, Default)]
pub(super) struct Announced {
    limit_reached: bool,
    numbers_taken: bool,
}

/// One thing to say.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Announcement {
    /// How the Event is marked.
    pub(super) severity: Severity,
    /// The reason of the Event.
    pub(super) reason: &'static str,
    /// The text for people.
    pub(super) text: String,
}

impl Announced {
    /// Returns what is new since the last plan, after writing it to the log.
    pub(super) fn update(&mut self, plan: &FrontPlan) -> Vec<Announcement> {
        let mut news = Vec::new();
        let waiting = waiting(plan, WhyWaiting::ListenerLimit);
        let limit = plan.limit.unwrap_or_default();
        if changes(&mut self.limit_reached, !waiting.is_empty()) {
            news.push(if self.limit_reached {
                let text = format!(
                    "All {limit} listeners are in use; {} ports wait for one: {}. Raise --listener-limit if \
                     the load balancer allows it, or expose clusters by SNI",
                    waiting.len(),
                    named(&waiting)
                );
                Announcement { severity: Severity::Warning, reason: "ListenerLimitReached", text }
            } else {
                let used = plan.used;
                let text = format!("{used} of {limit} listeners are in use and no port waits any more");
                Announcement { severity: Severity::Normal, reason: "ListenerLimitLeft", text }
            });
        }
        let waiting = self::waiting(plan, WhyWaiting::NumberTaken);
        if changes(&mut self.numbers_taken, !waiting.is_empty()) {
            news.push(if self.numbers_taken {
                let text = format!(
                    "{} ports cannot be published, because another Service or the gateway has their number: \
                     {}. Give them another nodePort",
                    waiting.len(),
                    named(&waiting)
                );
                Announcement { severity: Severity::Warning, reason: "PortNumberTaken", text }
            } else {
                let text = "No port waits for its number any more".to_owned();
                Announcement { severity: Severity::Normal, reason: "PortNumberFree", text }
            });
        }
        for Announcement { severity, text, .. } in &news {
            match severity {
                Severity::Warning => warn!(used = plan.used, waiting = plan.waiting.len(), "{text}"),
                Severity::Normal => info!(used = plan.used, waiting = plan.waiting.len(), "{text}"),
            }
        }
        news
    }
}

fn changes(said: &mut bool, now: bool) -> bool {
    std::mem::replace(said, now) != now
}

fn waiting(plan: &FrontPlan, why: WhyWaiting) -> Vec<String> {
    let waiting = plan.waiting.iter().filter(|waiting| waiting.why == why);
    waiting.map(|waiting| format!("{} ({})", waiting.service, waiting.node_port)).collect()
}

fn named(waiting: &[String]) -> String {
    let more = if waiting.len() > MAX_NAMED { ", ..." } else { "" };
    format!("{}{more}", waiting[..waiting.len().min(MAX_NAMED)].join(", "))
}

#[cfg(test)]
mod tests {
    use portico_api::meta::ObjectKey;
    use portico_expose::front::Waiting;

    use super::*;

    fn plan(waiting: &[(&str, WhyWaiting)]) -> FrontPlan {
        let waiting = waiting
            .iter()
            .map(|&(name, why)| Waiting { service: ObjectKey::new("default", name), node_port: 30_001, why })
            .collect();
        FrontPlan { ports: Vec::new(), waiting, used: 4, limit: Some(4), changed: false }
    }

    fn reasons(news: &[Announcement]) -> Vec<&str> {
        news.iter().map(|news| news.reason).collect()
    }

    #[test]
    fn waiting_is_announced_when_it_begins_and_when_it_ends() {
        let mut announced = Announced::default();
        assert_eq!(reasons(&announced.update(&plan(&[]))), [""; 0]);
        let one = plan(&[("a", WhyWaiting::ListenerLimit)]);
        let news = announced.update(&one);
        assert_eq!(reasons(&news), ["ListenerLimitReached"]);
        assert!(news[0].text.contains("default/a (30001)"), "{}", news[0].text);
        assert_eq!(reasons(&announced.update(&one)), [""; 0]);
        assert_eq!(reasons(&announced.update(&plan(&[]))), ["ListenerLimitLeft"]);
    }

    #[test]
    fn each_reason_to_wait_is_announced_by_itself() {
        let mut announced = Announced::default();
        let taken = plan(&[("b", WhyWaiting::NumberTaken)]);
        assert_eq!(reasons(&announced.update(&taken)), ["PortNumberTaken"]);
        let both = plan(&[("a", WhyWaiting::ListenerLimit), ("b", WhyWaiting::NumberTaken)]);
        assert_eq!(reasons(&announced.update(&both)), ["ListenerLimitReached"]);
        assert_eq!(reasons(&announced.update(&plan(&[]))), ["ListenerLimitLeft", "PortNumberFree"]);
    }

    #[test]
    fn a_thousand_waiting_ports_are_not_all_named() {
        let names: Vec<String> = (0..1_000).map(|index| format!("s{index}")).collect();
        let waiting: Vec<_> = names.iter().map(|name| (name.as_str(), WhyWaiting::ListenerLimit)).collect();
        let news = Announced::default().update(&plan(&waiting));
        assert!(news[0].text.len() < 400, "{}", news[0].text);
    }
}
