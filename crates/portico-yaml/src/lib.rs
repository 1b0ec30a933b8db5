//! YAML and JSON text as trees that know their lines, within bounds.
//!
//! The source reads files that may be broken: half written, from a wrong template, or an alias bomb. So this
//! parser decides three things that a plain deserialiser leaves open. A syntax error ends one document and
//! not the file. Every value has its line, for messages. Depth, size and the copies that aliases make are
//! bounded. JSON is read the same way, being a subset of YAML 1.2.
//!
//! Scalars follow the core schema of YAML 1.2 (section 10.3.2). Merge keys (`<<`) work, as they do in
//! Kubernetes' own reader. The parser underneath is the one that `kube` uses for kubeconfig files.

mod typed;
mod write;

pub use typed::{InvalidField, typed};
pub use write::write;

use std::collections::{HashMap, HashSet};

use granit_parser::{Event, Parser, ScalarStyle, Span, StrInput, Tag, options};
use serde_json::{Number, Value};
use thiserror::Error;

/// Deepest nesting of collections. Kubernetes objects stay below 20; more is a mistake or an attack on the
/// stack.
const MAX_DEPTH: usize = 64;

/// Most values in one document: ten thousand clusters in one `List` have some 600,000.
const MAX_NODES: usize = 1_000_000;

/// Most values that anchors, aliases and merge keys may add to one document by copying. Real manifests copy a
/// few dozen; an alias bomb copies billions.
const MAX_COPIES: usize = 100_000;

/// Bytes of text that count as one value when copied: about the size of a [`Node`].
const TEXT_OF_A_VALUE: usize = 64;

/// A value and the line it begins on.
#[derive(Debug, Clone, PartialEq)]
pub struct Node {
    /// Counted from 1.
    pub line: u32,
    /// The value.
    pub content: Content,
}

/// What a [`Node`] is.
#[derive(Debug, Clone, PartialEq)]
pub enum Content {
    /// Null, a boolean, a number or text; never a collection.
    Scalar(Value),
    /// A sequence.
    List(Vec<Node>),
    /// A mapping, in the order written, without repeated keys.
    Map(Vec<Entry>),
}

/// One key of a mapping and its value.
#[derive(Debug, Clone, PartialEq)]
pub struct Entry {
    /// The key as text.
    pub key: Box<str>,
    /// Line of the key, where a reader looks for the field.
    pub line: u32,
    /// Its value.
    pub value: Node,
}

/// Why a document cannot be read. The rest of the file can.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{message}")]
pub struct YamlError {
    /// The line where it was noticed, counted from 1.
    pub line: u32,
    /// What is wrong.
    pub message: String,
}

/// The documents of a text, one at a time, so that a file of ten thousand objects is never in memory as one
/// tree.
pub struct Documents<'text> {
    parser: Parser<'text, StrInput<'text>>,
    ended: bool,
}

impl<'text> Documents<'text> {
    /// The documents of `text`.
    pub fn new(text: &'text str) -> Self {
        let options = options! {
            emit_comments: false,
            flow_nesting_limit: MAX_DEPTH,
            block_nesting_limit: MAX_DEPTH,
        };
        // A byte order mark is legal at the start (YAML 1.2 section 5.2) and common from editors on Windows.
        let text = text.strip_prefix('\u{feff}').unwrap_or(text);
        Self { parser: Parser::new_from_str_with_options(text, options), ended: false }
    }

    /// Skips the broken document, if the parser can find the next one.
    fn skip_document(&mut self) {
        self.ended = !self.parser.proceed_next_document().unwrap_or(false);
    }
}

impl Iterator for Documents<'_> {
    type Item = Result<Node, YamlError>;

    fn next(&mut self) -> Option<Self::Item> {
        let mut builder = None;
        while !self.ended {
            let (event, span) = match self.parser.next_event()? {
                Ok(next) => next,
                Err(error) => {
                    let failed =
                        YamlError { line: line_number(error.marker().line()), message: error.info() };
                    self.skip_document();
                    return Some(Err(failed));
                }
            };
            match event {
                Event::StreamStart => {}
                Event::StreamEnd => self.ended = true,
                Event::DocumentStart(..) => builder = Some(Builder::new()),
                Event::DocumentEnd => {
                    if let Some(root) = builder.take().and_then(|builder| builder.root) {
                        return Some(Ok(root));
                    }
                }
                event => {
                    let builder = builder.get_or_insert_with(Builder::new);
                    if let Err(message) = builder.add(event, &span) {
                        let line = line_number(span.start.line());
                        self.skip_document();
                        return Some(Err(YamlError { line, message }));
                    }
                }
            }
        }
        None
    }
}

/// Builds one tree from the events of the parser.
struct Builder {
    root: Option<Node>,
    open: Vec<Collection>,
    anchors: HashMap<usize, Node>,
    nodes_left: usize,
    copies_left: usize,
}

/// A collection whose end has not come yet.
struct Collection {
    line: u32,
    anchor: usize,
    kind: Open,
}

enum Open {
    List(Vec<Node>),
    Map { entries: Vec<Entry>, key: Option<(Box<str>, u32)>, merged: Vec<Entry> },
}

impl Builder {
    fn new() -> Self {
        Self {
            root: None,
            open: Vec::new(),
            anchors: HashMap::new(),
            nodes_left: MAX_NODES,
            copies_left: MAX_COPIES,
        }
    }

    fn add(&mut self, event: Event<'_>, span: &Span) -> Result<(), String> {
        let line = line_number(span.start.line());
        match event {
            Event::Scalar(text, style, anchor, tag) => {
                self.count_node()?;
                if let Some(key) = self.awaited_key() {
                    *key = Some((text.as_ref().into(), line));
                    if anchor == 0 {
                        return Ok(());
                    }
                    let node = Node { line, content: Content::Scalar(Value::String(text.into_owned())) };
                    return self.remember(anchor, &node);
                }
                let content = Content::Scalar(scalar(&text, style, tag.as_deref()));
                self.finish(anchor, Node { line, content })
            }
            Event::SequenceStart(_, anchor, _) => {
                self.begin(Collection { line, anchor, kind: Open::List(Vec::new()) })
            }
            Event::MappingStart(_, anchor, _) => {
                let kind = Open::Map { entries: Vec::new(), key: None, merged: Vec::new() };
                self.begin(Collection { line, anchor, kind })
            }
            Event::SequenceEnd | Event::MappingEnd => self.end(),
            Event::Alias(id) => {
                let node = self.anchors.get(&id).ok_or("an alias stands inside the value it refers to")?;
                count_copies(&mut self.copies_left, node.weight())?;
                if self.open.len() + node.depth() > MAX_DEPTH {
                    return Err(too_deep());
                }
                let mut node = node.clone();
                node.line = line;
                if let Some(key) = self.awaited_key() {
                    let Content::Scalar(Value::String(text)) = node.content else {
                        return Err("a mapping key must be text".into());
                    };
                    *key = Some((text.into(), line));
                    return Ok(());
                }
                self.attach(node)
            }
            // Comments are off and unresolved aliases are errors; nothing else carries data.
            _ => Ok(()),
        }
    }

    /// The slot of the next key, if the next node is a key.
    fn awaited_key(&mut self) -> Option<&mut Option<(Box<str>, u32)>> {
        match &mut self.open.last_mut()?.kind {
            Open::Map { key, .. } if key.is_none() => Some(key),
            _ => None,
        }
    }

    fn begin(&mut self, collection: Collection) -> Result<(), String> {
        self.count_node()?;
        if self.awaited_key().is_some() {
            return Err("a mapping key must be text, not a collection".into());
        }
        if self.open.len() >= MAX_DEPTH {
            return Err(too_deep());
        }
        self.open.push(collection);
        Ok(())
    }

    fn end(&mut self) -> Result<(), String> {
        let Some(collection) = self.open.pop() else {
            return Err("a collection ends that never began".into());
        };
        let content = match collection.kind {
            Open::List(items) => Content::List(items),
            Open::Map { mut entries, merged, .. } => {
                reject_repeated_keys(&entries)?;
                if !merged.is_empty() {
                    add_merged(&mut entries, merged);
                }
                Content::Map(entries)
            }
        };
        self.finish(collection.anchor, Node { line: collection.line, content })
    }

    fn finish(&mut self, anchor: usize, node: Node) -> Result<(), String> {
        if anchor != 0 {
            self.remember(anchor, &node)?;
        }
        self.attach(node)
    }

    fn remember(&mut self, anchor: usize, node: &Node) -> Result<(), String> {
        count_copies(&mut self.copies_left, node.weight())?;
        self.anchors.insert(anchor, node.clone());
        Ok(())
    }

    /// Adds a complete node to its parent.
    fn attach(&mut self, node: Node) -> Result<(), String> {
        let Some(parent) = self.open.last_mut() else {
            self.root = Some(node);
            return Ok(());
        };
        match &mut parent.kind {
            Open::List(items) => items.push(node),
            Open::Map { entries, key, merged } => {
                let Some((key, line)) = key.take() else {
                    return Err("a mapping key must be text".into());
                };
                if &*key == "<<" {
                    return merge(merged, node);
                }
                entries.push(Entry { key, line, value: node });
            }
        }
        Ok(())
    }

    fn count_node(&mut self) -> Result<(), String> {
        self.nodes_left = self.nodes_left.checked_sub(1).ok_or_else(|| {
            format!("the document has more than {MAX_NODES} values; split it into several documents")
        })?;
        Ok(())
    }
}

fn too_deep() -> String {
    format!("collections are nested more than {MAX_DEPTH} deep")
}

fn count_copies(left: &mut usize, weight: usize) -> Result<(), String> {
    *left = left
        .checked_sub(weight)
        .ok_or_else(|| format!("anchors and aliases repeat more than {MAX_COPIES} values; write them out"))?;
    Ok(())
}

/// `<<: *defaults` and `<<: [*first, *second]`.
fn merge(merged: &mut Vec<Entry>, node: Node) -> Result<(), String> {
    match node.content {
        Content::Map(entries) => {
            merged.extend(entries);
            Ok(())
        }
        Content::List(items) => items.into_iter().try_for_each(|item| merge(merged, item)),
        Content::Scalar(_) => Err("a merge key (<<) takes a mapping or a list of mappings".into()),
    }
}

/// A written value wins over a merged one, and of two merged values the first wins.
fn add_merged(entries: &mut Vec<Entry>, merged: Vec<Entry>) {
    let mut present: HashSet<Box<str>> = entries.iter().map(|entry| entry.key.clone()).collect();
    entries.extend(merged.into_iter().filter(|entry| present.insert(entry.key.clone())));
}

/// Kubernetes refuses a repeated key; using the last one silently would hide a mistake.
fn reject_repeated_keys(entries: &[Entry]) -> Result<(), String> {
    let mut keys: Vec<&Entry> = entries.iter().collect();
    keys.sort_by(|a, b| a.key.cmp(&b.key));
    match keys.windows(2).find(|pair| pair[0].key == pair[1].key) {
        None => Ok(()),
        Some(pair) => {
            let (first, second) = (pair[0].line, pair[1].line);
            let lines = if first == second {
                format!("on line {first}")
            } else {
                format!("on line {first} and on line {second}")
            };
            Err(format!("the key {:?} stands twice, {lines}", pair[0].key))
        }
    }
}

/// The value of a scalar by tag, by style and, if plain, by its text.
fn scalar(text: &str, style: ScalarStyle, tag: Option<&Tag>) -> Value {
    let plain = match tag.and_then(Tag::core_suffix) {
        Some("str") => false,
        Some(_) => true,
        None => style == ScalarStyle::Plain,
    };
    if plain { plain_scalar(text) } else { Value::String(text.into()) }
}

/// Resolves by the core schema of YAML 1.2. What JSON cannot hold (`.inf`, `.nan`) stays text.
fn plain_scalar(text: &str) -> Value {
    match text {
        "" | "~" | "null" | "Null" | "NULL" => return Value::Null,
        "true" | "True" | "TRUE" => return Value::Bool(true),
        "false" | "False" | "FALSE" => return Value::Bool(false),
        _ => {}
    }
    number(text).map_or_else(|| Value::String(text.into()), Value::Number)
}

fn number(text: &str) -> Option<Number> {
    if let Some(digits) = text.strip_prefix("0x") {
        return u64::from_str_radix(digits, 16).ok().map(Number::from);
    }
    if let Some(digits) = text.strip_prefix("0o") {
        return u64::from_str_radix(digits, 8).ok().map(Number::from);
    }
    let unsigned = text.strip_prefix(['+', '-']).unwrap_or(text);
    // Names like `1.2.3`, `12-34` and `infinity` stay text, although the standard library may parse them.
    if !unsigned.bytes().any(|byte| byte.is_ascii_digit())
        || !unsigned.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'.' | b'e' | b'E' | b'+' | b'-'))
        || !unsigned.starts_with(|first: char| first.is_ascii_digit() || first == '.')
    {
        return None;
    }
    let text = text.strip_prefix('+').unwrap_or(text);
    if let Ok(number) = text.parse::<i64>() {
        return Some(number.into());
    }
    if let Ok(number) = text.parse::<u64>() {
        return Some(number.into());
    }
    text.parse().ok().and_then(Number::from_f64)
}

fn line_number(line: usize) -> u32 {
    u32::try_from(line).unwrap_or(u32::MAX)
}

impl Node {
    /// The value of `key`, if this is a mapping that has it.
    pub fn get(&self, key: &str) -> Option<&Node> {
        match &self.content {
            Content::Map(entries) => {
                entries.iter().find(|entry| &*entry.key == key).map(|entry| &entry.value)
            }
            _ => None,
        }
    }

    /// Its text, if it is text.
    pub fn as_str(&self) -> Option<&str> {
        match &self.content {
            Content::Scalar(Value::String(text)) => Some(text),
            _ => None,
        }
    }

    /// The cost of a copy: the number of its values, itself included; long text counts as several.
    fn weight(&self) -> usize {
        1 + match &self.content {
            Content::Scalar(Value::String(text)) => text.len() / TEXT_OF_A_VALUE,
            Content::Scalar(_) => 0,
            Content::List(items) => items.iter().map(Self::weight).sum(),
            Content::Map(entries) => {
                entries.iter().map(|entry| entry.key.len() / TEXT_OF_A_VALUE + entry.value.weight()).sum()
            }
        }
    }

    /// How many collections are nested in it, itself included.
    fn depth(&self) -> usize {
        match &self.content {
            Content::Scalar(_) => 0,
            Content::List(items) => 1 + items.iter().map(Self::depth).max().unwrap_or(0),
            Content::Map(entries) => 1 + entries.iter().map(|entry| entry.value.depth()).max().unwrap_or(0),
        }
    }

    /// This value without line numbers.
    pub fn to_value(&self) -> Value {
        match &self.content {
            Content::Scalar(value) => value.clone(),
            Content::List(items) => Value::Array(items.iter().map(Self::to_value).collect()),
            Content::Map(entries) => Value::Object(
                entries.iter().map(|entry| (entry.key.as_ref().to_owned(), entry.value.to_value())).collect(),
            ),
        }
    }

    /// Returns the line of the field at `path` (`spec.ports[0].nodePort`), or of the nearest value above it
    /// that exists.
    ///
    /// Keys may hold dots (`metadata.annotations.nodeport-proxy.k8s.io/expose`): the longest key that fits
    /// wins.
    pub fn line_of(&self, path: &str) -> u32 {
        let mut node = self;
        let mut line = self.line;
        let mut rest = path;
        while !rest.is_empty() {
            let step = match &node.content {
                Content::Map(entries) => entries
                    .iter()
                    .filter_map(|entry| Some((entry, after_key(rest, &entry.key)?)))
                    .max_by_key(|(entry, _)| entry.key.len())
                    .map(|(entry, rest)| (&entry.value, entry.line, rest)),
                Content::List(items) => after_index(rest)
                    .and_then(|(index, rest)| items.get(index).map(|item| (item, item.line, rest))),
                Content::Scalar(_) => None,
            };
            let Some((next, next_line, next_rest)) = step else { break };
            (node, line, rest) = (next, next_line, next_rest);
        }
        line
    }
}

/// The rest of `path` after `key`, if `path` starts with exactly this key, bare or as `[key]`.
fn after_key<'a>(path: &'a str, key: &str) -> Option<&'a str> {
    let rest = match path.strip_prefix('[') {
        Some(path) => {
            let path = path.strip_prefix('"').unwrap_or(path).strip_prefix(key)?;
            path.strip_prefix('"').unwrap_or(path).strip_prefix(']')?
        }
        None => path.strip_prefix(key)?,
    };
    match rest.chars().next() {
        None | Some('[') => Some(rest),
        Some('.') => Some(&rest[1..]),
        Some(_) => None,
    }
}

/// `[3].rest` and `3.rest`.
fn after_index(path: &str) -> Option<(usize, &str)> {
    let digits = path.strip_prefix('[').unwrap_or(path);
    let end = digits.find(|c: char| !c.is_ascii_digit()).unwrap_or(digits.len());
    let index = digits[..end].parse().ok()?;
    let rest = digits[end..].strip_prefix(']').unwrap_or(&digits[end..]);
    Some((index, rest.strip_prefix('.').unwrap_or(rest)))
}

#[cfg(test)]
mod tests;
