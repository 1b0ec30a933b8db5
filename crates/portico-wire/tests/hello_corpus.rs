//! Hellos of real clients, cut and split at every byte. `corpus/README.md` says where they come from.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use portico_wire::Parse;
use portico_wire::hello::{self, ClientHello, Progress};

fn corpus() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus")
}

/// One recorded hello and what must be read out of it.
struct Recorded {
    file: String,
    bytes: Vec<u8>,
    server_name: Option<String>,
    alpn: Vec<String>,
    newest: String,
    records: usize,
}

fn recorded() -> Vec<Recorded> {
    let expected =
        fs::read_to_string(corpus().join("expected.tsv")).expect("corpus/expected.tsv is committed");
    expected.lines().map(read_line).collect()
}

fn read_line(line: &str) -> Recorded {
    let [file, server_name, alpn, newest, records] = line.split('\t').collect::<Vec<_>>()[..] else {
        panic!("not five columns: {line}")
    };
    Recorded {
        file: file.to_owned(),
        bytes: fs::read(corpus().join("hello").join(file)).expect("every file of expected.tsv is committed"),
        server_name: (server_name != "-").then(|| server_name.to_owned()),
        alpn: alpn.split(',').filter(|name| *name != "-").map(str::to_owned).collect(),
        newest: newest.to_owned(),
        records: records.parse().expect("the number of records is a number"),
    }
}

/// The handshake message in the records, and the version in their headers.
fn message(mut records: &[u8]) -> ([u8; 2], Vec<Vec<u8>>) {
    let version = [records[1], records[2]];
    let mut payloads = Vec::new();
    while let [22, _, _, high, low, rest @ ..] = records {
        let (payload, after) = rest.split_at(usize::from(u16::from_be_bytes([*high, *low])));
        payloads.push(payload.to_vec());
        records = after;
    }
    (version, payloads)
}

fn in_records<'a>(version: [u8; 2], payloads: impl IntoIterator<Item = &'a [u8]>) -> Vec<u8> {
    let record =
        |payload: &[u8]| [&[22], &version[..], &(payload.len() as u16).to_be_bytes(), payload].concat();
    payloads.into_iter().flat_map(record).collect()
}

/// Everything but the length, which counts record headers.
fn content<'a>(hello: &ClientHello<'a>) -> ClientHello<'a> {
    ClientHello { len: 0, ..hello.clone() }
}

#[track_caller]
fn complete<'a>(bytes: &'a [u8], what: &str) -> ClientHello<'a> {
    match hello::parse(bytes) {
        Parse::Complete(hello) => hello,
        other => panic!("{what}: {other:?}"),
    }
}

#[test]
fn every_recorded_client_is_asked_for_the_name_it_was_given() {
    for Recorded { file, bytes, server_name, alpn, newest, records } in recorded() {
        let hello = complete(&bytes, &file);
        assert_eq!(hello.server_name.as_deref(), server_name.as_deref(), "{file}");
        let offered: Vec<String> = hello.alpn.iter().map(|name| name.escape_ascii().to_string()).collect();
        assert_eq!(offered, alpn, "{file}");
        assert_eq!(hello.supports_tls13, newest == "1.3", "{file}");
        let legacy = format!("1.{}", (hello.legacy_version & 0xff) - 1);
        assert_eq!(legacy, if newest == "1.3" { "1.2" } else { &newest }, "{file}");
        assert_eq!(hello.len, bytes.len(), "{file}");
        assert_eq!(message(&bytes).1.len(), records, "{file}");
    }
}

#[test]
fn every_recording_has_its_expectation() {
    let files: BTreeSet<String> = fs::read_dir(corpus().join("hello"))
        .expect("corpus/hello is committed")
        .map(|entry| entry.expect("corpus/hello can be read").file_name().to_string_lossy().into_owned())
        .collect();
    assert_eq!(files, recorded().into_iter().map(|hello| hello.file).collect());
    assert!(files.len() >= 20, "the corpus has shrunk to {}", files.len());
}

#[test]
fn a_recorded_hello_cut_at_any_byte_waits_for_the_rest() {
    for Recorded { file, bytes, .. } in recorded() {
        let mut progress = Progress::default();
        for cut in 0..bytes.len() {
            assert!(hello::parse(&bytes[..cut]).needs_more(), "{file} cut at {cut}");
            assert!(progress.parse(&bytes[..cut]).needs_more(), "{file} in steps, at {cut}");
        }
        assert_eq!(progress.parse(&bytes), hello::parse(&bytes), "{file}");
    }
}

#[test]
fn a_recorded_hello_split_into_records_at_any_byte_gives_the_same_answer() {
    for Recorded { file, bytes, .. } in recorded() {
        let whole = content(&complete(&bytes, &file));
        let (version, payloads) = message(&bytes);
        let message = payloads.concat();
        for at in 1..message.len() {
            let (first, second) = message.split_at(at);
            let split = in_records(version, [first, second]);
            assert_eq!(content(&complete(&split, &file)), whole, "{file} split at {at}");
        }
        for size in 1..=64 {
            let split = in_records(version, message.chunks(size));
            assert_eq!(content(&complete(&split, &file)), whole, "{file} in records of {size}");
        }
    }
}

#[test]
fn early_data_behind_a_recorded_hello_changes_nothing() {
    for Recorded { file, bytes, .. } in recorded() {
        let longer = [&bytes[..], &[23, 3, 3, 0, 1, 0]].concat();
        assert_eq!(complete(&longer, &file), complete(&bytes, &file), "{file}");
    }
}

#[test]
fn damage_inside_a_whole_message_is_answered_for_good() {
    for Recorded { file, bytes, .. } in recorded() {
        let (version, payloads) = message(&bytes);
        let message = payloads.concat();
        for at in 4..message.len() {
            for damage in [0x01, 0x10, 0x80, 0xff] {
                let mut damaged = message.clone();
                damaged[at] ^= damage;
                let records = in_records(version, damaged.chunks(1 << 14));
                assert!(!hello::parse(&records).needs_more(), "{file}: byte {at} ^ {damage:#x}");
            }
        }
    }
}
