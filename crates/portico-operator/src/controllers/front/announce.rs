//! Announces the reasons why a front Service is not as wanted. Each goes to the log and Events when it begins
//! and when it ends, and is a condition in between.

use std::collections::BTreeMap;

use portico_api::meta::ObjectKey;
use portico_expose::front::{FrontPlan, MAX_PORTS_OF_NAMESPACE, WhyWaiting};
use portico_kube::events::Severity;
use tracing::{info, warn};

/// Most waiting ports named in one text; `/status` has all of them.
const MAX_NAMED: usize = 5;

/// Something that keeps the Service from being as wanted. The worst comes first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Trouble {
    /// The API server refused a write, or was not reached.
    WriteRefused,
    /// Another client writes the same fields.
    ForeignWriter,
    /// No port is wanted, and the old ones stay.
    NothingToPublish,
    /// The load balancer has no listener left.
    ListenerLimit,
    /// A port number is used twice.
    NumberTaken,
    /// Settings of the Seed cannot be put on the Service.
    SettingsNotCarried,
    /// A namespace asks for more ports than it can have. Anybody in it can cause that, so it hides nothing.
    NamespaceLimit,
}

impl Trouble {
    /// The reason of the Event when it begins, and of the condition.
    pub(super) fn reason(self) -> &'static str {
        match self {
            Self::WriteRefused => "WriteRefused",
            Self::ForeignWriter => "ForeignWriter",
            Self::NothingToPublish => "NothingToPublish",
            Self::ListenerLimit => "ListenerLimitReached",
            Self::NumberTaken => "PortNumberTaken",
            Self::SettingsNotCarried => "SettingsNotCarried",
            Self::NamespaceLimit => "NamespaceLimitReached",
        }
    }

    /// Reason and text of the Event when it ends.
    fn end(self) -> (&'static str, &'static str) {
        match self {
            Self::WriteRefused => ("WriteAccepted", "The Service can be written again"),
            Self::ForeignWriter => ("ForeignWriterGone", "No other client reverts the Service any more"),
            Self::NothingToPublish => ("PortsToPublish", "There are ports to publish again"),
            Self::ListenerLimit => ("ListenerLimitLeft", "No port waits for a listener any more"),
            Self::NumberTaken => ("PortNumberFree", "No port waits for its number any more"),
            Self::SettingsNotCarried => ("SettingsCarried", "The settings of the Seed are on the Service"),
            Self::NamespaceLimit => ("NamespaceLimitLeft", "No namespace asks for too many ports any more"),
        }
    }
}

/// The troubles of one Service, each with a text for people.
pub(super) type Troubles = BTreeMap<Trouble, String>;

/// The troubles that were announced and have not ended; `None` before the first time.
#[derive(Debug, Default)]
pub(super) struct Announced(Option<Vec<Trouble>>);

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
    /// Whether nothing was announced yet. A replica that begins to lead knows of none, and the condition may
    /// say what the one before has announced.
    pub(super) fn is_new(&self) -> bool {
        self.0.is_none()
    }

    /// Returns what began or ended since the last time, after writing it to the log.
    pub(super) fn update(&mut self, service: &ObjectKey, troubles: &Troubles) -> Vec<Announcement> {
        let before = self.0.take().unwrap_or_default();
        let began = troubles.iter().filter(|(trouble, _)| !before.contains(trouble));
        let mut news: Vec<_> = began
            .map(|(trouble, text)| Announcement {
                severity: Severity::Warning,
                reason: trouble.reason(),
                text: text.clone(),
            })
            .collect();
        for ended in before.iter().filter(|trouble| !troubles.contains_key(trouble)) {
            let (reason, text) = ended.end();
            news.push(Announcement { severity: Severity::Normal, reason, text: text.to_owned() });
        }
        self.0 = Some(troubles.keys().copied().collect());
        for Announcement { severity, reason, text } in &news {
            match severity {
                Severity::Warning => warn!(%service, reason, "{text}"),
                Severity::Normal => info!(%service, reason, "{text}"),
            }
        }
        news
    }
}

/// The troubles that the plan itself has.
pub(super) fn troubles_of(plan: &FrontPlan) -> Troubles {
    let mut troubles = Troubles::new();
    if plan.nothing_to_publish {
        let text = "No Service is exposed here, and the API server takes no Service without ports: the ports \
                    stay as they are. Expose a Service, or delete this one";
        troubles.insert(Trouble::NothingToPublish, text.to_owned());
    }
    let waiting = waiting(plan, WhyWaiting::ListenerLimit);
    if !waiting.is_empty() {
        let text = format!(
            "All {} listeners are in use; ports that wait for one ({}): {}. Raise --listener-limit if the \
             load balancer allows it, or expose clusters by SNI",
            plan.limit.unwrap_or_default(),
            waiting.len(),
            named(&waiting)
        );
        troubles.insert(Trouble::ListenerLimit, text);
    }
    let waiting = self::waiting(plan, WhyWaiting::NumberTaken);
    if !waiting.is_empty() {
        let text = format!(
            "ports whose number another Service or the gateway has cannot be published ({}): {}. Give them \
             another nodePort",
            waiting.len(),
            named(&waiting)
        );
        troubles.insert(Trouble::NumberTaken, text);
    }
    let waiting = self::waiting(plan, WhyWaiting::NamespaceLimit);
    if !waiting.is_empty() {
        let text = format!(
            "of a namespace {MAX_PORTS_OF_NAMESPACE} ports are published, beside those of its control plane; \
             not so ({}): {}. Expose these Services by SNI, or not at all",
            waiting.len(),
            named(&waiting)
        );
        troubles.insert(Trouble::NamespaceLimit, text);
    }
    troubles
}

/// The text of [`Trouble::ForeignWriter`].
pub(super) fn foreign_writer(writer: &str) -> String {
    format!(
        "{writer} keeps reverting what Portico writes to this Service, so Portico has stopped and tries \
         again every ten minutes. Stop the other writer (KKP's is the Deployment nodeport-proxy-updater, in \
         the namespace of a cluster nodeport-proxy-lb-updater), or portico front"
    )
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
    use portico_expose::front::Waiting;

    use super::*;

    fn plan(waiting: &[(&str, WhyWaiting)]) -> FrontPlan {
        let waiting = waiting
            .iter()
            .map(|&(name, why)| Waiting { service: ObjectKey::new("default", name), node_port: 30_001, why })
            .collect();
        FrontPlan {
            ports: Vec::new(),
            nothing_to_publish: false,
            waiting,
            used: 4,
            limit: Some(4),
            changed: false,
        }
    }

    fn update(announced: &mut Announced, plan: &FrontPlan) -> Vec<Announcement> {
        announced.update(&ObjectKey::new("portico", "portico"), &troubles_of(plan))
    }

    fn reasons(news: &[Announcement]) -> Vec<&str> {
        news.iter().map(|news| news.reason).collect()
    }

    #[test]
    fn waiting_is_announced_when_it_begins_and_when_it_ends() {
        let mut announced = Announced::default();
        assert_eq!(reasons(&update(&mut announced, &plan(&[]))), [""; 0]);
        let one = plan(&[("a", WhyWaiting::ListenerLimit)]);
        let news = update(&mut announced, &one);
        assert_eq!(reasons(&news), ["ListenerLimitReached"]);
        assert!(news[0].text.contains("default/a (30001)"), "{}", news[0].text);
        assert_eq!(reasons(&update(&mut announced, &one)), [""; 0]);
        assert_eq!(reasons(&update(&mut announced, &plan(&[]))), ["ListenerLimitLeft"]);
    }

    #[test]
    fn each_trouble_is_announced_by_itself() {
        let mut announced = Announced::default();
        let taken = plan(&[("b", WhyWaiting::NumberTaken)]);
        assert_eq!(reasons(&update(&mut announced, &taken)), ["PortNumberTaken"]);
        let both = plan(&[("a", WhyWaiting::ListenerLimit), ("b", WhyWaiting::NumberTaken)]);
        assert_eq!(reasons(&update(&mut announced, &both)), ["ListenerLimitReached"]);
        assert_eq!(reasons(&update(&mut announced, &plan(&[]))), ["ListenerLimitLeft", "PortNumberFree"]);
    }

    #[test]
    fn a_namespace_that_asks_for_too_many_ports_is_announced_after_all_else() {
        let mut announced = Announced::default();
        let both = plan(&[("a", WhyWaiting::NamespaceLimit), ("b", WhyWaiting::NumberTaken)]);
        let news = update(&mut announced, &both);
        assert_eq!(reasons(&news), ["PortNumberTaken", "NamespaceLimitReached"]);
        assert!(news[1].text.contains("of a namespace 50 ports are published"));
        let ended = update(&mut announced, &plan(&[("b", WhyWaiting::NumberTaken)]));
        assert_eq!(reasons(&ended), ["NamespaceLimitLeft"]);
    }

    #[test]
    fn a_thousand_waiting_ports_are_not_all_named() {
        let names: Vec<String> = (0..1_000).map(|index| format!("s{index}")).collect();
        let waiting: Vec<_> = names.iter().map(|name| (name.as_str(), WhyWaiting::ListenerLimit)).collect();
        let news = update(&mut Announced::default(), &plan(&waiting));
        assert!(news[0].text.len() < 400, "{}", news[0].text);
    }
}
