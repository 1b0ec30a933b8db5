//! Whatever stands in a manifest: no panic, no explosion of aliases, every object with a place, and problems
//! that can be printed.
#![no_main]

use std::path::Path;

use libfuzzer_sys::fuzz_target;
use portico_source::load::read_text_as;

fuzz_target!(|text: &str| {
    let file = Path::new("a.yaml");
    let loaded = read_text_as(file, text);
    let lines = u32::try_from(text.split(['\n', '\r']).count()).unwrap_or(u32::MAX);
    for object in &loaded.objects {
        let reference = object.reference();
        assert!(!reference.key.name.is_empty());
        for field in [
            "",
            "metadata.name",
            "spec.ports[0].port",
            "spec.ports[x",
            "[",
            "9",
            "metadata.annotations.a.b/c",
        ] {
            let place = loaded.line_of(&reference, field).expect("every object has a place");
            assert!((1..=lines + 1).contains(&place.line), "line {} of {lines}", place.line);
        }
    }
    for problem in &loaded.problems {
        assert!(problem.to_string().starts_with("a.yaml:"), "{problem}");
        assert!(problem.line <= lines + 1, "line {} of {lines}", problem.line);
    }
    // The same text read twice gives the same objects, which is what a restart relies on.
    let again = read_text_as(file, text);
    assert_eq!((loaded.objects, loaded.problems), (again.objects, again.problems));
});
