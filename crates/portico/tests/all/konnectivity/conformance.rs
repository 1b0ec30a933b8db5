//! `docs/konnectivity-conformance.md` names tests: all of them exist.

use std::fs;
use std::path::Path;

/// The text of every source file below `folder`.
fn sources(folder: &Path) -> String {
    let entries = fs::read_dir(folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    let texts = entries.map(|entry| entry.unwrap().path()).map(|path| match path.is_dir() {
        true => sources(&path),
        false => fs::read_to_string(path).unwrap(),
    });
    texts.collect()
}

#[test]
fn every_test_that_the_page_names_exists() {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let folders = [
        "portico/tests/all",
        "portico/src/verb/konnectivity",
        "portico-konnectivity/tests",
        "portico-konnectivity/src",
        "portico-wire/src/konnectivity",
    ];
    let tests: String = folders.iter().map(|folder| sources(&crates.join(folder))).collect();
    let page = fs::read_to_string(crates.join("../docs/konnectivity-conformance.md")).unwrap();
    let names: Vec<&str> = page.split('`').skip(1).step_by(2).filter(|name| !name.contains('/')).collect();
    assert!(names.len() > 50, "{} names: the page has another form now", names.len());
    for name in names {
        // A function, or an entry of a table of tests.
        let is_there = tests.contains(&format!("fn {name}(")) || tests.contains(&format!("    {name}:"));
        assert!(is_there, "there is no test {name}");
    }
}
