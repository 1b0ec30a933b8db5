use super::*;

/// An index with files of Services, each written as `name` or `name=type`.
#[derive(Default)]
struct World {
    index: ManifestIndex,
    texts: BTreeMap<String, String>,
}

impl World {
    fn write(&mut self, file: &str, text: &str) -> &mut Self {
        self.texts.insert(file.into(), text.into());
        self
    }

    fn services(&mut self, file: &str, services: &[&str]) -> &mut Self {
        let documents: Vec<String> = services.iter().map(|service| document(service)).collect();
        // A comment, so that a file without services is not an empty one.
        self.write(file, &format!("# services\n{}", documents.join("---\n")))
    }

    fn delete(&mut self, file: &str) -> &mut Self {
        self.texts.remove(file);
        self
    }

    /// One burst: the named files are read again.
    fn burst(&mut self, files: &[&str]) -> Vec<String> {
        let mut changes = Vec::new();
        let mut emit = |change| changes.push(show(&change));
        for file in files {
            match self.texts.get(*file) {
                Some(text) => {
                    self.index.update(&Path::new(file).into(), Signature::of(text), text, false, &mut emit);
                }
                None => self.index.remove(Path::new(file)),
            }
        }
        for owner in self.index.resolve(&mut emit) {
            let text = &self.texts[owner.to_str().unwrap()];
            self.index.update(&owner, Signature::of(text), text, false, &mut emit);
        }
        changes
    }

    fn problems(&self) -> Vec<String> {
        self.index
            .problems()
            .iter()
            .map(|problem| {
                format!("{}:{} {}", problem.file.as_ref().unwrap().display(), problem.line, problem.reason)
            })
            .collect()
    }
}

fn document(service: &str) -> String {
    let (name, kind) = service.split_once('=').unwrap_or((service, "ClusterIP"));
    format!("apiVersion: v1\nkind: Service\nmetadata: {{name: {name}}}\nspec: {{type: {kind}}}\n")
}

fn show(change: &Change<Object>) -> String {
    match change {
        Change::Apply(object) => format!("+{}", object.metadata().name),
        Change::Delete(object) => format!("-{}", object.key.name),
    }
}

#[test]
fn only_what_changed_in_a_file_is_handed_on() {
    let mut world = World::default();
    assert_eq!(world.services("f", &["a", "b"]).burst(&["f"]), ["+a", "+b"]);
    assert_eq!(world.services("f", &["a", "b=NodePort", "c"]).burst(&["f"]), ["+b", "+c"]);
    assert_eq!(world.services("f", &["b=NodePort", "c"]).burst(&["f"]), ["-a"]);
    assert_eq!(world.burst(&["f"]), [""; 0]);
    assert_eq!(world.delete("f").burst(&["f"]).len(), 2);
}

#[test]
fn a_broken_document_takes_nothing_down() {
    let mut world = World::default();
    world.services("f", &["a", "b"]).burst(&["f"]);
    let broken = format!("{}---\nkind: [\n", document("a=NodePort"));
    assert_eq!(world.write("f", &broken).burst(&["f"]), ["+a"]);
    assert_eq!(world.problems(), ["f:6 syntax"]);
    assert_eq!(world.services("f", &["a=NodePort"]).burst(&["f"]), ["-b"]);
    assert_eq!(world.problems(), [""; 0]);
}

#[test]
fn an_object_that_no_longer_fits_its_kind_stays_while_others_may_go() {
    let mut world = World::default();
    world.services("f", &["a", "b"]).burst(&["f"]);
    let text = document("a").replace("ClusterIP", "Nonsense");
    assert_eq!(world.write("f", &text).burst(&["f"]), ["-b"]);
    assert_eq!(world.problems(), ["f:4 invalid"]);
}

#[test]
fn an_empty_file_is_taken_for_a_file_being_written() {
    let mut world = World::default();
    world.services("f", &["a"]).burst(&["f"]);
    assert_eq!(world.write("f", "").burst(&["f"]), [""; 0]);
    assert_eq!(world.problems(), ["f:0 empty-file"]);
    assert_eq!(world.services("f", &[]).burst(&["f"]), ["-a"]);
}

#[test]
fn what_a_file_lacks_while_it_is_being_written_is_not_gone() {
    let mut world = World::default();
    world.services("f", &["a", "b"]).burst(&["f"]);
    let (path, text) = (Path::new("f").into(), document("a=NodePort"));
    let mut changes = Vec::new();
    world.index.update(&path, Signature::of(1), &text, true, &mut |change| changes.push(show(&change)));
    world.index.resolve(&mut |change| changes.push(show(&change)));
    assert_eq!(changes, ["+a"]);
    // Closed without another byte: now it is.
    assert_eq!(world.write("f", &text).burst(&["f"]), ["-b"]);
}

#[test]
fn the_first_file_in_path_order_wins_and_the_other_is_a_problem() {
    let mut world = World::default();
    world.services("m", &["a"]).services("z", &["a=NodePort"]);
    assert_eq!(world.burst(&["z", "m"]), ["+a", "+a"]);
    assert_eq!(world.problems(), ["z:2 duplicate"]);
    assert_eq!(world.services("z", &["a=LoadBalancer"]).burst(&["z"]), [""; 0]);
    assert_eq!(world.services("b", &["a"]).burst(&["b"]), ["+a"]);
    assert_eq!(world.problems(), ["m:2 duplicate", "z:2 duplicate"]);
    assert_eq!(world.delete("m").burst(&["m"]), [""; 0]);
    assert_eq!(world.delete("b").burst(&["b"]), ["+a"]);
    assert_eq!(world.problems(), [""; 0]);
    assert_eq!(world.delete("z").burst(&["z"]), ["-a"]);
}

#[test]
fn an_object_that_moves_to_another_file_is_never_gone() {
    let mut world = World::default();
    world.services("f", &["a", "b"]).burst(&["f"]);
    for (from, to) in [("f", "g"), ("g", "e")] {
        world.services(to, &["a", "b"]).delete(from);
        let changes = world.burst(&[from, to]);
        assert!(!changes.is_empty() && !changes.iter().any(|change| change.starts_with('-')), "{changes:?}");
    }
}

#[test]
fn the_same_object_twice_in_one_file_is_a_problem() {
    let mut world = World::default();
    assert_eq!(world.services("f", &["a", "a=NodePort"]).burst(&["f"]), ["+a"]);
    assert_eq!(world.problems(), ["f:7 duplicate"]);
}

#[test]
fn a_file_that_cannot_be_read_keeps_what_it_held() {
    let mut world = World::default();
    world.services("f", &["a"]).burst(&["f"]);
    let path: Arc<Path> = Path::new("f").into();
    let problem = still_empty(&path);
    world.index.fail(&path, Signature::of(1), problem);
    assert!(world.index.resolve(&mut |_| {}).is_empty());
    assert_eq!(world.problems().len(), 1);
    assert!(!world.index.is_current(&path, Signature::of(1)), "it is tried again");
    assert_eq!(world.burst(&["f"]), [""; 0]);
    assert_eq!(world.problems(), [""; 0]);
}

#[test]
fn files_below_a_folder_do_not_include_its_neighbours() {
    let mut world = World::default();
    for file in ["d/a", "d/b/c", "d-x/a", "d.yaml", "e"] {
        world.services(file, &[]).burst(&[file]);
    }
    let below = |folder| world.index.files_below(Path::new(folder)).count();
    assert_eq!((below("d"), below("d/b"), below("d/b/c"), below("x")), (2, 1, 1, 0));
}
