//! A plan as people read it.

use std::fmt;

use portico_api::annotations::{EXPOSE, EXPOSE_NAMESPACED};
use portico_api::service::Service;

use super::{DoorPlan, ManagedBy, MigrationPlan, Party};

/// Columns of a terminal, as the help of the command line has them.
const COLUMNS: usize = 110;

/// The word of a line in a step, and where its text begins.
const INDENT: usize = 16;

impl fmt::Display for ManagedBy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Hosted => "Portico hosts it",
            Self::Elsewhere => "its API server runs elsewhere",
            Self::Pods => "somebody's pods are its API server",
            Self::Kkp => "KKP's controllers keep it",
        })
    }
}

impl fmt::Display for Party {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Operator => "operator",
            Self::Kkp => "KKP",
            Self::Administrator => "you",
        })
    }
}

impl fmt::Display for MigrationPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let restarts = match (self.managed_by, self.restarts_api_server) {
            (ManagedBy::Hosted, _) => "the API server does not restart",
            (ManagedBy::Elsewhere, _) => "Portico restarts nothing there",
            (_, false) => "the API server need not restart",
            (_, true) => "the API server restarts",
        };
        let (from, to) = (self.from.strategy, self.to.strategy);
        let title =
            format!("Cluster {}, from {from} to {to}: {}, {restarts}.", self.cluster, self.managed_by);
        lines(f, "", 0, &title)?;
        for (index, blocker) in self.blockers.iter().enumerate() {
            if index == 0 {
                writeln!(f)?;
            }
            lines(f, "BLOCKED", 9, &format!("{}; {}", blocker.what, blocker.remedy))?;
        }
        writeln!(f)?;
        doors(f, &self.from, &self.to)?;
        self.while_both(f)?;
        for (index, step) in self.steps.iter().enumerate() {
            writeln!(f, "\n{} {:<12} {}", index + 1, step.name, step.who)?;
            lines(f, "  does", INDENT, &step.does)?;
            lines(f, "  proof", INDENT, &step.proof)?;
            lines(f, "  users notice", INDENT, &step.users)?;
            lines(f, "  back", INDENT, &step.back)?;
        }
        for (index, note) in self.notes.iter().enumerate() {
            if index == 0 {
                writeln!(f)?;
            }
            lines(f, "-", 2, note)?;
        }
        Ok(())
    }
}

impl MigrationPlan {
    fn while_both(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(both) = &self.both else {
            return writeln!(f, "\nThe two are never open together.");
        };
        writeln!(f, "\nWhile both are open:")?;
        let width = both.services.iter().map(|service| service.metadata.name.len()).max().unwrap_or_default();
        for service in &both.services {
            writeln!(f, "  Service {:<width$}  {}", service.metadata.name, exposed(service))?;
        }
        let certificate = match (self.managed_by, &self.missing_names[..]) {
            (ManagedBy::Hosted, _) => "Portico issues it with the names of both".to_owned(),
            (_, []) => "nothing is known to be missing".to_owned(),
            (_, missing) => format!("lacks {}", missing.join(", ")),
        };
        lines(f, "  certificate", 2 + 8 + width + 2, &certificate)
    }
}

/// Type and annotations of a Service.
fn exposed(service: &Service) -> String {
    let annotation = |key: &str, name: &str| {
        service.metadata.annotation(key).map(|value| format!(", {name}: {value}")).unwrap_or_default()
    };
    let (expose, namespaced) =
        (annotation(EXPOSE, "expose"), annotation(EXPOSE_NAMESPACED, "expose-namespaced"));
    format!("{:?}{expose}{namespaced}", service.spec.service_type)
}

/// The two doors as a table, with a line for each further key.
fn doors(f: &mut fmt::Formatter<'_>, from: &DoorPlan, to: &DoorPlan) -> fmt::Result {
    let mut rows = vec![["DOOR", "STRATEGY", "ADDRESS", "REACHED BY"].map(str::to_owned)];
    for (name, door) in [("old", from), ("new", to)] {
        let agents = door.agent_ip.map(|ip| format!("agents on nodes, at {ip}"));
        let mut keys = door.keys.iter().cloned().chain(agents);
        let first = keys.next().unwrap_or_default();
        rows.push([name.to_owned(), door.strategy.to_string(), door.url().to_owned(), first]);
        rows.extend(keys.map(|key| [String::new(), String::new(), String::new(), key]));
    }
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or_default();
    let (a, b, c) = (width(0), width(1), width(2));
    for [door, strategy, address, key] in &rows {
        writeln!(f, "{door:<a$}  {strategy:<b$}  {address:<c$}  {key}")?;
    }
    Ok(())
}

/// A word, and text from column `indent` on, in lines that a terminal holds. A word that is longer than a
/// line has one of its own.
fn lines(f: &mut fmt::Formatter<'_>, word: &str, indent: usize, text: &str) -> fmt::Result {
    let mut line = format!("{word:<indent$}");
    let mut length = indent;
    let mut is_first = true;
    for part in text.split_whitespace() {
        let part_length = part.chars().count();
        if !is_first && length + 1 + part_length > COLUMNS {
            writeln!(f, "{line}")?;
            line = " ".repeat(indent);
            length = indent;
            is_first = true;
        }
        if !is_first {
            line.push(' ');
            length += 1;
        }
        line.push_str(part);
        length += part_length;
        is_first = false;
    }
    writeln!(f, "{line}")
}
