//! The directory source over real files, written in the odd ways in which editors and volumes write them.

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::time::Duration;

use portico_api::change::Change;
use portico_source::{DirectorySource, Object, Step};
use tempfile::TempDir;

/// Far beyond anything that happens when all is well: a step that has not come by then will never come.
const NEVER: Duration = Duration::from_secs(20);

/// A directory, its source, and everything that the source has delivered.
struct World {
    folder: TempDir,
    source: DirectorySource,
    /// Type of each Service by `namespace/name`.
    services: BTreeMap<String, String>,
    deleted: Vec<String>,
    complete_steps: usize,
    last: Step,
}

impl World {
    /// A source over what `prepare` puts into the directory, up to its first complete step.
    async fn open(prepare: impl FnOnce(&Path)) -> Self {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join("manifests")).unwrap();
        prepare(&folder.path().join("manifests"));
        let source = DirectorySource::open(&folder.path().join("manifests")).unwrap();
        let mut world = Self {
            folder,
            source,
            services: BTreeMap::new(),
            deleted: Vec::new(),
            complete_steps: 0,
            last: Step::default(),
        };
        world.step().await;
        world
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join("manifests").join(name)
    }

    /// Writes a file elsewhere and renames it into place.
    fn put(&self, name: &str, text: &str) {
        let temporary = self.folder.path().join("temporary");
        fs::write(&temporary, text).unwrap();
        fs::rename(temporary, self.path(name)).unwrap();
    }

    /// Waits for the next complete step and applies everything up to it.
    async fn step(&mut self) {
        loop {
            let step = tokio::time::timeout(NEVER, self.source.next())
                .await
                .unwrap_or_else(|_| panic!("no further step; so far: {:?}", self.services))
                .expect("the source lives as long as the test");
            for change in &step.changes {
                match change {
                    Change::Apply(Object::Service(service)) => {
                        let kind = format!("{:?}", service.spec.service_type);
                        self.services.insert(service.metadata.key().to_string(), kind);
                    }
                    Change::Apply(_) => {}
                    Change::Delete(object) => {
                        self.services.remove(&object.key.to_string());
                        self.deleted.push(object.key.to_string());
                    }
                }
            }
            self.last = step;
            if self.last.complete {
                self.complete_steps += 1;
                return;
            }
        }
    }

    /// Waits until the services are exactly these, written as `name` or `name=type`.
    async fn until(&mut self, services: &[&str]) {
        let wanted: BTreeMap<String, String> = services
            .iter()
            .map(|service| service.split_once('=').unwrap_or((service, "ClusterIP")))
            .map(|(name, kind)| (format!("default/{name}"), kind.to_owned()))
            .collect();
        while self.services != wanted {
            self.step().await;
        }
    }

    async fn until_no_problem(&mut self) {
        while !self.last.problems.is_empty() {
            self.step().await;
        }
    }

    async fn until_problem(&mut self, reason: &str) {
        while !self.last.problems.iter().any(|problem| problem.reason == reason) {
            self.step().await;
        }
    }
}

fn service(name: &str) -> String {
    typed(name, "ClusterIP")
}

fn typed(name: &str, kind: &str) -> String {
    format!("apiVersion: v1\nkind: Service\nmetadata: {{name: {name}}}\nspec: {{type: {kind}}}\n---\n")
}

#[tokio::test]
async fn the_first_complete_step_holds_everything() {
    let world = World::open(|folder| {
        fs::create_dir(folder.join("sub")).unwrap();
        for index in 0..3_000 {
            fs::write(folder.join(format!("sub/{index}.yaml")), service(&format!("s{index}"))).unwrap();
        }
        fs::write(folder.join("a.json"), r#"{"apiVersion":"v1","kind":"Service","metadata":{"name":"j"}}"#)
            .unwrap();
    })
    .await;
    assert_eq!(world.services.len(), 3_001);
    assert_eq!(world.complete_steps, 1);
}

#[tokio::test]
async fn an_empty_directory_completes_the_initial_sync() {
    let world = World::open(|_| {}).await;
    assert!(world.services.is_empty() && world.last.complete && world.last.problems.is_empty());
}

#[tokio::test]
async fn a_file_renamed_over_another_is_one_step() {
    let mut world =
        World::open(|folder| fs::write(folder.join("a.yaml"), service("a") + &service("b")).unwrap()).await;
    world.put("a.yaml", &(typed("a", "NodePort") + &service("c")));
    world.step().await;
    world.until(&["a=NodePort", "c"]).await;
    assert_eq!(world.complete_steps, 2);
}

#[tokio::test]
async fn a_file_truncated_and_written_in_pieces_loses_nothing() {
    let mut world =
        World::open(|folder| fs::write(folder.join("a.yaml"), service("a") + &service("b")).unwrap()).await;
    let mut file = File::create(world.path("a.yaml")).unwrap();
    file.write_all(typed("a", "NodePort").as_bytes()).unwrap();
    // A step for another file shows that the source has been awake while this one was half written.
    world.put("other.yaml", &service("o"));
    world.until(&["a", "b", "o"]).await;
    file.write_all(service("b").as_bytes()).unwrap();
    drop(file);
    world.until(&["a=NodePort", "b", "o"]).await;
    assert!(world.deleted.is_empty());
}

#[tokio::test]
async fn an_empty_file_keeps_what_it_held_until_it_is_written_or_deleted() {
    let mut world = World::open(|folder| fs::write(folder.join("a.yaml"), service("a")).unwrap()).await;
    File::create(world.path("a.yaml")).unwrap();
    world.until_problem("empty-file").await;
    world.until(&["a"]).await;
    let mut file = OpenOptions::new().append(true).open(world.path("a.yaml")).unwrap();
    file.write_all(typed("a", "NodePort").as_bytes()).unwrap();
    drop(file);
    world.until(&["a=NodePort"]).await;
    assert!(world.deleted.is_empty());
    fs::remove_file(world.path("a.yaml")).unwrap();
    world.until(&[]).await;
}

#[tokio::test]
async fn a_broken_document_keeps_its_last_good_version_and_is_reported_until_it_is_mended() {
    let mut world =
        World::open(|folder| fs::write(folder.join("a.yaml"), service("a") + &service("b")).unwrap()).await;
    world.put("a.yaml", &(typed("a", "NodePort") + "kind: [\n"));
    world.until_problem("syntax").await;
    world.until(&["a=NodePort", "b"]).await;
    assert_eq!(world.last.problems[0].line, 6);
    world.put("a.yaml", &typed("a", "NodePort"));
    world.until(&["a=NodePort"]).await;
    assert!(world.last.problems.is_empty());
}

#[tokio::test]
async fn a_configmap_volume_is_swapped_in_one_step() {
    fn volume(folder: &Path, name: &str, files: &[(&str, String)]) {
        fs::create_dir(folder.join(name)).unwrap();
        for (file, text) in files {
            fs::write(folder.join(name).join(file), text).unwrap();
        }
        symlink(name, folder.join("..data_tmp")).unwrap();
        fs::rename(folder.join("..data_tmp"), folder.join("..data")).unwrap();
    }
    let mut world = World::open(|folder| {
        volume(folder, "..2026_1", &[("a.yaml", service("a")), ("b.yaml", service("b"))]);
        symlink("..data/a.yaml", folder.join("a.yaml")).unwrap();
        symlink("..data/b.yaml", folder.join("b.yaml")).unwrap();
    })
    .await;
    world.until(&["a", "b"]).await;
    assert!(world.last.problems.is_empty());
    // As the kubelet does it: new folder, swap, new links, stale links, old folder.
    volume(&world.path(""), "..2026_2", &[("a.yaml", typed("a", "NodePort")), ("c.yaml", service("c"))]);
    symlink("..data/c.yaml", world.path("c.yaml")).unwrap();
    fs::remove_file(world.path("b.yaml")).unwrap();
    fs::remove_dir_all(world.path("..2026_1")).unwrap();
    world.until(&["a=NodePort", "c"]).await;
    assert_eq!(world.deleted, ["default/b"]);
}

#[tokio::test]
async fn a_folder_made_and_filled_at_once_is_read_and_watched() {
    let mut world = World::open(|_| {}).await;
    fs::create_dir_all(world.path("x/y")).unwrap();
    fs::write(world.path("x/y/a.yaml"), service("a")).unwrap();
    world.until(&["a"]).await;
    fs::write(world.path("x/y/b.yaml"), service("b")).unwrap();
    world.until(&["a", "b"]).await;
    fs::rename(world.path("x"), world.path("z")).unwrap();
    fs::write(world.path("z/y/c.yaml"), service("c")).unwrap();
    world.until(&["a", "b", "c"]).await;
    fs::remove_dir_all(world.path("z")).unwrap();
    world.until(&[]).await;
}

#[tokio::test]
async fn a_file_renamed_to_another_name_loses_nothing() {
    let mut world = World::open(|folder| fs::write(folder.join("m.yaml"), service("a")).unwrap()).await;
    for (from, to) in [("m.yaml", "z.yaml"), ("z.yaml", "b.yaml")] {
        fs::rename(world.path(from), world.path(to)).unwrap();
        world.put("mark.yaml", &typed("mark", if to == "z.yaml" { "ClusterIP" } else { "NodePort" }));
        world.step().await;
    }
    world.until(&["a", "mark=NodePort"]).await;
    assert!(world.deleted.is_empty());
}

#[tokio::test]
async fn a_file_that_takes_over_while_it_is_being_written_loses_nothing() {
    let mut world = World::open(|folder| {
        fs::write(folder.join("a.yaml"), service("x")).unwrap();
        fs::write(folder.join("b.yaml"), service("x") + &service("y")).unwrap();
    })
    .await;
    let mut file = File::create(world.path("b.yaml")).unwrap();
    file.write_all(typed("x", "NodePort").as_bytes()).unwrap();
    fs::remove_file(world.path("a.yaml")).unwrap();
    // No longer a duplicate: the other file has taken over.
    world.until_no_problem().await;
    file.write_all(service("y").as_bytes()).unwrap();
    drop(file);
    world.until(&["x=NodePort", "y"]).await;
    assert!(world.deleted.is_empty());
}

#[tokio::test]
async fn a_file_that_takes_over_and_was_read_before_it_was_closed_loses_nothing() {
    let mut world = World::open(|folder| {
        fs::write(folder.join("a.yaml"), service("x")).unwrap();
        fs::write(folder.join("b.yaml"), service("x") + &service("y") + &service("z")).unwrap();
    })
    .await;
    let mut file = File::create(world.path("b.yaml")).unwrap();
    file.write_all((typed("x", "NodePort") + &typed("z", "NodePort")).as_bytes()).unwrap();
    world.until(&["x", "y", "z=NodePort"]).await;
    fs::remove_file(world.path("a.yaml")).unwrap();
    world.until(&["x=NodePort", "y", "z=NodePort"]).await;
    file.write_all(service("y").as_bytes()).unwrap();
    drop(file);
    world.put("mark.yaml", &service("mark"));
    world.until(&["x=NodePort", "y", "z=NodePort", "mark"]).await;
    assert!(world.deleted.is_empty());
}

#[tokio::test]
async fn a_file_that_stays_open_without_a_write_loses_nothing_when_everything_is_compared() {
    let mut world = World::open(|folder| {
        fs::write(folder.join("a.yaml"), service("x") + &service("y")).unwrap();
        // With a link to a folder each new folder has everything compared.
        fs::create_dir(folder.join("../elsewhere")).unwrap();
        symlink("../elsewhere", folder.join("link")).unwrap();
    })
    .await;
    let mut file = File::create(world.path("a.yaml")).unwrap();
    file.write_all(typed("x", "NodePort").as_bytes()).unwrap();
    world.until(&["x=NodePort", "y"]).await;
    fs::create_dir(world.path("new")).unwrap();
    world.put("new/z.yaml", &service("z"));
    world.until(&["x=NodePort", "y", "z"]).await;
    file.write_all(service("y").as_bytes()).unwrap();
    drop(file);
    world.put("mark.yaml", &service("mark"));
    world.until(&["x=NodePort", "y", "z", "mark"]).await;
    assert!(world.deleted.is_empty(), "{:?}", world.deleted);
}

#[tokio::test]
async fn an_object_that_the_next_file_lacks_by_now_is_taken_from_the_one_after_it() {
    let mut world = World::open(|folder| {
        fs::write(folder.join("a.yaml"), service("x")).unwrap();
        fs::write(folder.join("../elsewhere"), service("x") + &service("y")).unwrap();
        symlink("../elsewhere", folder.join("b.yaml")).unwrap();
        fs::write(folder.join("c.yaml"), typed("x", "NodePort")).unwrap();
    })
    .await;
    // Inotify does not tell.
    fs::write(world.path("../elsewhere"), service("y")).unwrap();
    fs::remove_file(world.path("a.yaml")).unwrap();
    world.until(&["x=NodePort", "y"]).await;
    assert!(world.deleted.is_empty() && world.last.problems.is_empty());
}

#[tokio::test]
async fn an_editor_that_moves_the_old_file_away_first_loses_nothing() {
    let mut world = World::open(|folder| fs::write(folder.join("a.yaml"), service("a")).unwrap()).await;
    fs::rename(world.path("a.yaml"), world.path("a.yaml~")).unwrap();
    fs::write(world.path(".a.yaml.swp"), "kind: [").unwrap();
    fs::write(world.path("a.yaml"), typed("a", "NodePort")).unwrap();
    fs::remove_file(world.path("a.yaml~")).unwrap();
    world.until(&["a=NodePort"]).await;
    assert!(world.deleted.is_empty() && world.last.problems.is_empty());
}

#[tokio::test]
async fn while_the_directory_is_missing_everything_stays() {
    let mut world =
        World::open(|folder| fs::write(folder.join("a.yaml"), service("a") + &service("b")).unwrap()).await;
    fs::rename(world.path(""), world.folder.path().join("elsewhere")).unwrap();
    world.until_problem("missing-directory").await;
    world.until(&["a", "b"]).await;
    assert!(world.deleted.is_empty());
    fs::create_dir(world.path("")).unwrap();
    world.put("c.yaml", &(service("a") + &service("c")));
    world.until(&["a", "c"]).await;
    assert!(world.last.problems.is_empty());
    world.put("d.yaml", &service("d"));
    world.until(&["a", "c", "d"]).await;
}

#[tokio::test]
async fn while_the_directory_is_empty_everything_stays_until_a_file_says_that_there_is_nothing() {
    let mut world = World::open(|folder| fs::write(folder.join("a.yaml"), service("a")).unwrap()).await;
    fs::rename(world.path(""), world.folder.path().join("volume")).unwrap();
    world.until_problem("missing-directory").await;
    fs::create_dir(world.path("")).unwrap();
    world.until_problem("empty-directory").await;
    world.until(&["a"]).await;
    assert!(world.deleted.is_empty());
    world.put("none.yaml", "apiVersion: v1\nkind: List\nitems: []\n");
    world.until(&[]).await;
    assert!(world.last.problems.is_empty());
    world.put("a.yaml", &service("a"));
    world.until(&["a"]).await;
    fs::remove_file(world.path("none.yaml")).unwrap();
    fs::remove_file(world.path("a.yaml")).unwrap();
    world.until(&[]).await;
    assert!(world.last.problems.is_empty(), "a file that is removed is removed, the last one too");
}

#[tokio::test]
async fn a_directory_that_is_a_link_may_be_switched() {
    let folder = tempfile::tempdir().unwrap();
    for (release, name) in [("one", "a"), ("two", "b")] {
        fs::create_dir(folder.path().join(release)).unwrap();
        fs::write(folder.path().join(release).join("x.yaml"), service(name)).unwrap();
    }
    let mut world = World::open(|manifests| {
        fs::remove_dir(manifests).unwrap();
        symlink(folder.path().join("one"), manifests).unwrap();
    })
    .await;
    world.until(&["a"]).await;
    symlink(folder.path().join("two"), world.folder.path().join("next")).unwrap();
    fs::rename(world.folder.path().join("next"), world.folder.path().join("manifests")).unwrap();
    world.until(&["b"]).await;
    fs::write(folder.path().join("two/y.yaml"), service("c")).unwrap();
    world.until(&["b", "c"]).await;
}

#[tokio::test]
async fn a_burst_of_two_thousand_files_arrives_whole() {
    let mut world = World::open(|_| {}).await;
    let path = world.path("");
    let writer = std::thread::spawn(move || {
        for index in 0..2_000 {
            fs::write(path.join(format!("{index}.yaml")), service(&format!("s{index}"))).unwrap();
        }
    });
    while world.services.len() < 2_000 {
        world.step().await;
    }
    writer.join().unwrap();
    assert!(world.deleted.is_empty() && world.last.problems.is_empty());
}

#[tokio::test]
async fn a_burst_longer_than_the_kernels_queue_loses_nothing() {
    let mut world = World::open(|_| {}).await;
    // Steps that are not taken block the source, so that most of what follows exceeds the kernel's 16,384
    // events.
    for index in 0..2_000 {
        fs::write(world.path(&format!("{index}.yaml")), service(&format!("s{index}"))).unwrap();
    }
    let mut files = ["x.yaml", "y.yaml"].map(|name| File::create(world.path(name)).unwrap());
    for _ in 0..20_000 {
        for file in &mut files {
            file.write_all(b"#\n").unwrap();
        }
    }
    for index in 0..2_000 {
        let kind = if index == 0 { "LoadBalancer" } else { "NodePort" };
        fs::write(world.path(&format!("{index}.yaml")), typed(&format!("s{index}"), kind)).unwrap();
    }
    while world.services.len() < 2_000 || world.services.values().any(|kind| kind == "ClusterIP") {
        world.step().await;
    }
}

#[tokio::test]
async fn a_file_that_is_no_text_or_too_long_is_reported_and_its_objects_stay() {
    let mut world = World::open(|folder| fs::write(folder.join("a.yaml"), service("a")).unwrap()).await;
    fs::write(world.path("a.yaml"), b"apiVersion: v1\nkind: \xff\n").unwrap();
    world.until_problem("unreadable").await;
    assert!(world.last.problems[0].message.contains("line 2"), "{}", world.last.problems[0]);
    File::create(world.path("b.yaml")).unwrap().set_len(65 << 20).unwrap();
    while world.last.problems.len() < 2 {
        world.step().await;
    }
    world.until(&["a"]).await;
}

#[tokio::test]
async fn a_link_that_leads_nowhere_from_the_beginning_is_reported_whatever_its_name() {
    let world = World::open(|folder| {
        fs::write(folder.join("a.yaml"), service("a")).unwrap();
        symlink("unmounted", folder.join("volume")).unwrap();
    })
    .await;
    let problems: Vec<_> = world.last.problems.iter().map(ToString::to_string).collect();
    assert!(problems.len() == 1 && problems[0].contains("volume"), "{problems:?}");
}

#[tokio::test]
async fn what_a_link_led_to_stays_while_it_leads_nowhere_and_goes_with_the_link() {
    let mut world = World::open(|folder| {
        fs::write(folder.join("a.yaml"), service("a")).unwrap();
        fs::write(folder.join("b.yaml"), service("b")).unwrap();
        fs::create_dir(folder.join("../elsewhere")).unwrap();
        fs::write(folder.join("../elsewhere/c.yaml"), service("c")).unwrap();
        symlink("../elsewhere", folder.join("link")).unwrap();
    })
    .await;
    world.until(&["a", "b", "c"]).await;
    // In place of a file, as `ln -sf` makes it; and of a folder, as an unmounted volume leaves it.
    symlink("nowhere", world.path("temporary")).unwrap();
    fs::rename(world.path("temporary"), world.path("a.yaml")).unwrap();
    fs::rename(world.path("../elsewhere"), world.path("../away")).unwrap();
    // It is still watched, by the name of the link.
    fs::write(world.path("../away/c.yaml"), service("d")).unwrap();
    symlink("nowhere", world.path("other")).unwrap();
    // Everything is compared, since inotify does not tell.
    symlink(".", world.path("up")).unwrap();
    let unreadable = |world: &World| -> Vec<String> {
        let files = world.last.problems.iter().map(|problem| problem.file.as_deref().unwrap());
        files.map(|file| file.file_name().unwrap().to_string_lossy().into_owned()).collect()
    };
    while unreadable(&world) != ["a.yaml", "link", "other", "up"] {
        world.step().await;
    }
    assert!(world.last.problems[0].message.contains("leads nowhere"), "{}", world.last.problems[0]);
    world.put("mark.yaml", &service("mark"));
    world.until(&["a", "b", "c", "mark"]).await;
    assert!(world.deleted.is_empty(), "{:?}", world.deleted);
    fs::remove_file(world.path("link")).unwrap();
    fs::remove_file(world.path("a.yaml")).unwrap();
    world.until(&["b", "mark"]).await;
    while unreadable(&world) != ["other", "up"] {
        world.step().await;
    }
}

/// Links that fork and that lead to `/`, a pipe without a writer, an endless device, gigabytes.
#[tokio::test]
async fn what_must_not_be_read_is_reported_and_stops_nothing() {
    let mkfifo = |path: &Path| std::process::Command::new("mkfifo").arg(path).status().unwrap();
    let mut world = World::open(|folder| {
        fs::write(folder.join("a.yaml"), service("a")).unwrap();
        for level in ["one", "two", "three"] {
            fs::create_dir(folder.join(level)).unwrap();
            for (link, to) in [("left", "../one"), ("right", "../two"), ("up", "..")] {
                symlink(to, folder.join(level).join(link)).unwrap();
            }
        }
        symlink("/", folder.join("everything")).unwrap();
        symlink("/dev/zero", folder.join("endless.yaml")).unwrap();
        assert!(mkfifo(&folder.join("pipe.yaml")).success());
        File::create(folder.join("huge.yaml")).unwrap().set_len(5 << 30).unwrap();
        File::create(folder.join("large.yaml")).unwrap().set_len(65 << 20).unwrap();
    })
    .await;
    world.until(&["a"]).await;
    let is_reported = |world: &World, name: &str| {
        let path = world.path(name);
        world.last.problems.iter().any(|problem| problem.file.as_deref() == Some(&*path))
    };
    for name in ["pipe.yaml", "endless.yaml", "huge.yaml", "large.yaml", "everything", "three/up"] {
        assert!(is_reported(&world, name), "{name}: {:?}", world.last.problems);
    }
    world.put("three/b.yaml", &service("b"));
    world.until(&["a", "b"]).await;
    // Each is reported once, whether it is found by a look at all of them or by its own change.
    fs::remove_file(world.path("large.yaml")).unwrap();
    assert!(mkfifo(&world.path("large.yaml")).success());
    assert!(mkfifo(&world.path("new.yaml")).success());
    while !is_reported(&world, "new.yaml") {
        world.step().await;
    }
    fs::create_dir(world.path("four")).unwrap();
    world.put("four/d.yaml", &service("d"));
    world.until(&["a", "b", "d"]).await;
    let about = |name: &str| {
        let path = world.path(name);
        world.last.problems.iter().filter(|problem| problem.file.as_deref() == Some(&*path)).count()
    };
    for name in ["pipe.yaml", "large.yaml", "new.yaml", "endless.yaml", "huge.yaml"] {
        assert_eq!(about(name), 1, "{name}: {:?}", world.last.problems);
    }
    // A manifest may become a pipe, and the other way round.
    fs::remove_file(world.path("pipe.yaml")).unwrap();
    world.put("pipe.yaml", &service("c"));
    world.until(&["a", "b", "c", "d"]).await;
    assert!(!is_reported(&world, "pipe.yaml"));
}

#[tokio::test]
async fn portico_does_not_read_its_own_state() {
    let mut world = World::open(|_| {}).await;
    let state = portico_source::state::StateFile::new(&world.path(".portico"), "node-ports.json");
    state.save(&BTreeMap::from([("a", 30_000)])).unwrap();
    world.put("a.yaml", &service("a"));
    world.step().await;
    assert!(world.last.problems.is_empty());
    assert_eq!(world.complete_steps, 2);
}
