use super::*;

/// The objects of `text` as `line name`, and the rest.
fn read_text(text: &str) -> (Vec<String>, Reading) {
    let mut objects = Vec::new();
    let reading = read(&Path::new("a.yaml").into(), text, |found| {
        objects.push(format!("{} {}", found.node.line, found.object.reference()));
    });
    (objects, reading)
}

#[test]
fn objects_come_with_the_lines_of_their_documents() {
    let text = "apiVersion: v1\nkind: Service\nmetadata: {name: a}\n---\n# comment\n\
                apiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\nmetadata: {name: b, namespace: c}\n";
    let (objects, reading) = read_text(text);
    assert_eq!(objects, ["1 Service default/a", "6 EndpointSlice c/b"]);
    assert!(reading.problems.is_empty());
    assert_eq!(reading.missing, Missing::None);
}

#[test]
fn lists_are_taken_apart_whether_typed_or_not() {
    let json = r#"{"apiVersion": "v1", "kind": "List", "items": [
        {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "a"}},
        {"apiVersion": "v1", "kind": "ServiceList", "items": [{"metadata": {"name": "b"}}]}
    ]}"#;
    assert_eq!(read_text(json).0, ["2 Service default/a", "3 Service default/b"]);
}

#[test]
fn an_unknown_kind_is_a_warning_and_affects_no_other_document() {
    let (objects, reading) = read_text("apiVersion: apps/v1\nkind: Deployment\nmetadata: {name: a}\n");
    assert!(objects.is_empty());
    assert_eq!(reading.problems[0].severity, Severity::Warning);
    assert_eq!(reading.problems[0].reason, "unknown-kind");
    assert_eq!(reading.missing, Missing::None);
    let (_, reading) = read_text("apiVersion: v1\nkind: Cluster\nmetadata: {name: a}\n");
    assert!(reading.problems[0].remedy.contains("kubermatic.k8c.io/v1"));
}

#[test]
fn a_field_of_the_wrong_type_is_reported_with_its_line_and_its_object() {
    let (objects, reading) = read_text(
        "apiVersion: v1\nkind: Service\nmetadata:\n  name: a\nspec:\n  ports:\n  - port: 1\n  - \
         port: https\n",
    );
    assert!(objects.is_empty());
    let problem = &reading.problems[0];
    assert_eq!(problem.line, 8);
    let text = problem.to_string();
    assert!(text.starts_with("a.yaml:8: Service default/a: spec.ports[1].port: "), "{text}");
    assert_eq!(reading.missing, Missing::Some(vec![problem.object.clone().unwrap()]));
}

#[test]
fn a_name_with_lines_in_it_writes_no_lines_of_the_log() {
    let text = "{apiVersion: v1, kind: Service, metadata: {name: \"a\\n2026 ERROR all is lost\"}}";
    let (_, reading) = read_text(text);
    let text = reading.problems[0].to_string();
    assert!(text.contains("all is lost") && !text.contains('\n'), "{text}");
}

#[test]
fn a_syntax_error_may_hide_any_object() {
    let (objects, reading) =
        read_text("apiVersion: v1\nkind: [\n---\napiVersion: v1\nkind: Service\nmetadata: {name: a}\n");
    assert_eq!(objects, ["4 Service default/a"]);
    assert_eq!(reading.problems.len(), 1);
    assert_eq!(reading.missing, Missing::Any);
}

#[test]
fn an_empty_file_is_not_yet_written_but_a_comment_means_nothing() {
    assert_eq!(read_text(" \n").1.missing, Missing::Any);
    assert_eq!(read_text("# nothing any more\n").1.missing, Missing::None);
}

#[test]
fn equal_objects_have_equal_hashes_on_any_line() {
    let mut hashes = Vec::new();
    let text = "apiVersion: v1\nkind: Service\nmetadata: {name: a}\n---\n\n\
                {kind: Service, apiVersion: v1, metadata: {name: a}}\n---\n\
                apiVersion: v1\nkind: Service\nmetadata: {name: a}\nspec: {type: NodePort}\n";
    read(&Path::new("a").into(), text, |found| hashes.push(found.hash));
    assert_eq!(hashes[0], hashes[1]);
    assert_ne!(hashes[0], hashes[2]);
}

#[test]
fn a_file_of_another_format_does_not_fill_the_list_of_problems() {
    let (_, reading) = read_text(&"just text\n---\n".repeat(1_000));
    assert_eq!(reading.problems.len(), MAX_PROBLEMS_PER_FILE);
}
