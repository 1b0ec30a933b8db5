//! Our flags beside those that upstream's own programs print with `--help`.

use std::process::Command;

use clap::{Arg, Subcommand};
use portico_lab::programs;

use super::Verb;
use super::flag_values::time;

/// The flags of ours with another default than upstream's, each with the program's name.
const OTHER_DEFAULTS: [(&str, &str); 1] = [("server", "keepalive-time")];

/// A flag of upstream's.
struct Flag {
    name: String,
    /// As `--help` says it: `int`, `duration`; `bool` for a switch.
    kind: String,
    default: String,
}

impl Flag {
    /// From a line such as `  -v, --v Level   number for the log level verbosity (default 4)`.
    fn read(line: &str) -> Option<Self> {
        let (head, usage) = line.split_once("--")?.1.split_once("  ")?;
        let (name, kind) = head.split_once(' ').unwrap_or((head, "bool"));
        let said = usage.rsplit_once("(default ").and_then(|(_, rest)| rest.strip_suffix(')'));
        // A flag with the zero of its type has no default there.
        let zero = match kind {
            "bool" => "false",
            "int" | "uint" | "float32" => "0",
            "duration" => "0s",
            _ => "",
        };
        let default = said.unwrap_or(zero).trim_matches('"').to_owned();
        Some(Self { name: name.to_owned(), kind: kind.to_owned(), default })
    }

    /// Whether ours has the same default.
    fn is_default_of(&self, arg: &Arg) -> bool {
        let values: Vec<_> = arg.get_default_values().iter().map(|value| value.to_string_lossy()).collect();
        let ours = match arg.get_env() {
            // Both programs are given the variable's own name as its value.
            Some(variable) => variable.to_string_lossy().into_owned(),
            None => values.join(","),
        };
        match self.kind.as_str() {
            "duration" => time(&self.default).unwrap() == time(&ours).unwrap(),
            _ => self.default == ours,
        }
    }
}

/// The flags of upstream's program.
fn upstream(part: &str) -> Vec<Flag> {
    let program = programs::konnectivity().unwrap().join(part);
    let variables = ["PROXY_SERVER_ID", "PROXY_AGENT_ID"].map(|name| (name, name));
    let output = Command::new(program).arg("--help").envs(variables).output().unwrap();
    let help = String::from_utf8([output.stdout, output.stderr].concat()).unwrap();
    let flags: Vec<Flag> = help.lines().filter_map(Flag::read).filter(|flag| flag.name != "help").collect();
    assert!(flags.len() > 30, "its help has another form now:\n{help}");
    flags
}

#[test]
fn every_flag_that_upstreams_programs_print_is_taken_with_its_default() {
    let ours = Verb::augment_subcommands(clap::Command::new("konnectivity"));
    for part in ["server", "agent"] {
        let command = ours.find_subcommand(part).unwrap();
        for flag in upstream(part) {
            let name = flag.name.as_str();
            let is_named = |arg: &&Arg| {
                let aliases = arg.get_all_aliases().unwrap_or_default();
                arg.get_long() == Some(name) || aliases.contains(&name)
            };
            let arg =
                command.get_arguments().find(is_named).unwrap_or_else(|| panic!("{part} has no --{name}"));
            let as_given = [format!("--{name}={}", flag.default), format!("--{name}")];
            let forms = if flag.kind == "bool" { &as_given[..] } else { &as_given[..1] };
            for form in forms {
                let taken = command.clone().try_get_matches_from([part, form]);
                assert!(taken.is_ok(), "{part} {form}: {}", taken.unwrap_err());
            }
            let is_same = !OTHER_DEFAULTS.contains(&(part, name));
            // A hidden flag has no effect, whatever its value.
            let is_right = arg.is_hide_set() || flag.is_default_of(arg) == is_same;
            assert!(is_right, "{part} --{name}: {} there", flag.default);
        }
    }
}

#[test]
fn the_help_and_the_manual_name_the_defaults_that_differ() {
    let manual = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/konnectivity-server.md"));
    let (_, manual) = manual.split_once("\nTwo defaults differ").unwrap();
    let mut ours = Verb::augment_subcommands(clap::Command::new("konnectivity"));
    let help = ours.find_subcommand_mut("server").unwrap().render_long_help().to_string();
    let (_, help) = help.split_once("Two defaults differ").unwrap();
    // Upstream's release does not have the first one.
    let flags = ["backend-dial-timeout"].into_iter().chain(OTHER_DEFAULTS.map(|(_, flag)| flag));
    for text in [manual, help] {
        let (paragraph, _) = text.split_once("\n\n").unwrap();
        for flag in flags.clone() {
            assert!(paragraph.contains(&format!("--{flag}")), "--{flag}: {paragraph}");
        }
    }
}

#[test]
fn the_manual_lists_the_flags_that_upstreams_programs_do_not_take() {
    let manual = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/konnectivity.md"));
    let ours = Verb::augment_subcommands(clap::Command::new("konnectivity"));
    for (part, heading) in [("agent", "## From upstream's agent"), ("server", "## From upstream's server")] {
        let steps = manual.split_once(heading).unwrap().1;
        let back = steps.split_once("**Back**").unwrap().1.split_once("\n\n").unwrap().0;
        let theirs: Vec<String> = upstream(part).into_iter().map(|flag| flag.name).collect();
        let command = ours.find_subcommand(part).unwrap();
        // A hidden flag is for the manifests of another version of theirs.
        let with_effect = command.get_arguments().filter(|arg| !arg.is_hide_set());
        for name in with_effect.filter_map(Arg::get_long) {
            let is_theirs = theirs.iter().any(|theirs| theirs == name);
            assert!(is_theirs || back.contains(&format!("`--{name}`")), "{part}: --{name} is not listed");
        }
    }
}
