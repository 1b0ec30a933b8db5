use std::collections::BTreeMap;

use serde_json::json;

use super::*;

const OLD: &str = "https://a.example.com:31234";
const NEW: &str = "https://a.example.com:6443";
const OTHER: &str = "https://192.0.2.7:6443";

/// As kubelets write it, with what an administrator may have added.
const KUBECONFIG: &str = "\
apiVersion: v1
clusters:
- cluster:
    certificate-authority-data: QUFB
    server: https://a.example.com:31234  # the port of https://a.example.com:31234
  name: https://a.example.com:31234
contexts:
- context:
    cluster: https://a.example.com:31234
    namespace: default
    user: default-auth
  name: default-context
current-context: default-context
kind: Config
users:
- name: default-auth
  user:
    client-certificate: /var/lib/kubelet/pki/kubelet-client-current.pem
    client-key: /var/lib/kubelet/pki/kubelet-client-current.pem
";
const BOOTSTRAP: &str = "clusters: [{name: default, cluster: {server: 'https://a.example.com:31234'}}]\n\
                         users: [{name: default, user: {token: abcdef.0123456789abcdef}}]\n";
const RECORD: &str = "{\n  \"server\": \"https://a.example.com:31234\",\n  \"node\": \"worker-1\"\n}\n";

/// The files of a machine, by path.
type Disk = BTreeMap<PathBuf, String>;

fn paths() -> Paths {
    Paths::below(Path::new("/"))
}

fn disk() -> Disk {
    let paths = paths();
    [(paths.kubeconfig(), KUBECONFIG), (paths.bootstrap(), BOOTSTRAP), (paths.record(), RECORD)]
        .map(|(path, text)| (path, text.to_owned()))
        .into()
}

fn plan_on(disk: &Disk, server: &str) -> Option<Move> {
    let (paths, text) = (paths(), |path: PathBuf| disk.get(&path).map(String::as_str));
    let present = Present {
        kubeconfig: text(paths.kubeconfig()).unwrap(),
        before: text(paths.before_move()),
        bootstrap: text(paths.bootstrap()),
        record: text(paths.record()).unwrap(),
    };
    plan(&present, server, &paths).unwrap()
}

fn take(disk: &mut Disk, steps: &[Step]) {
    for step in steps {
        match step {
            Step::Write(file) => drop(disk.insert(file.path.clone(), file.content.clone())),
            Step::Remove(path) => drop(disk.remove(path)),
        }
    }
}

/// Whether all that names a server names this one, and no move is unfinished.
fn is_at(disk: &Disk, server: &str) -> bool {
    plan_on(disk, server).is_none()
}

/// All that a move does, with or without the proof.
fn steps(way: &Move, proven: bool) -> Vec<Step> {
    let parts = if proven { vec![&way.begin, &way.finish] } else { vec![&way.begin, &way.back, &way.undone] };
    parts.into_iter().flatten().cloned().collect()
}

/// A whole move.
fn moved(disk: &mut Disk, server: &str, proven: bool) {
    let way = plan_on(disk, server).unwrap();
    take(disk, &steps(&way, proven));
}

#[test]
fn only_the_server_changes_and_all_else_stays_as_it_was_written() {
    let mut disk = disk();
    let way = plan_on(&disk, NEW).unwrap();
    assert_eq!(way.from, OLD);
    take(&mut disk, &steps(&way, true));
    assert!(is_at(&disk, NEW));
    let line = "    server: https://a.example.com:31234";
    assert_eq!(
        disk[&paths().kubeconfig()],
        KUBECONFIG.replace(line, "    server: https://a.example.com:6443")
    );
    assert_eq!(disk[&paths().bootstrap()], BOOTSTRAP.replace(OLD, NEW));
    assert_eq!(disk[&paths().record()], RECORD.replace(OLD, NEW));
    assert_eq!(disk.len(), 3, "{disk:?}");
    moved(&mut disk, OLD, true);
    assert_eq!(disk, self::disk(), "and back");
}

#[test]
fn a_file_in_one_line_says_the_same_of_another_server() {
    let one_line = |server: &str| {
        let cluster = json!({"server": server});
        json!({"clusters": [{"name": OLD, "cluster": cluster}], "users": [{"name": OLD}]})
    };
    for text in [one_line(OLD).to_string(), format!("# {OLD}\n{}", one_line(OLD))] {
        let file = Naming::read(Path::new("/f"), &text, OF_KUBECONFIG).unwrap();
        let changed = file.with(NEW);
        let value = Documents::new(&changed).next().unwrap().unwrap().to_value();
        assert_eq!(value, one_line(NEW), "{changed}");
        assert_eq!(server_of(&changed).as_deref(), Some(NEW));
    }
    let record = json!({"node": OLD, "server": OLD}).to_string();
    let changed = Naming::read(Path::new("/f"), &record, OF_RECORD).unwrap().with(NEW);
    assert_eq!(serde_json::from_str::<Value>(&changed).unwrap(), json!({"node": OLD, "server": NEW}));
    let slash = KUBECONFIG.replace("31234  #", "31234/  #");
    assert_eq!(server_of(&slash).as_deref(), Some(OLD));
}

#[test]
fn a_machine_that_is_there_needs_nothing_and_one_that_is_half_there_does() {
    let mut disk = disk();
    assert!(is_at(&disk, OLD) && !is_at(&disk, NEW));
    // Somebody moved the kubelet alone.
    disk.insert(paths().kubeconfig(), KUBECONFIG.replace(OLD, NEW));
    let way = plan_on(&disk, NEW).unwrap();
    assert_eq!(way.kubeconfig, disk[&paths().kubeconfig()]);
    let half = disk.clone();
    take(&mut disk, &steps(&way, false));
    assert_eq!(disk, half, "nothing but the kubelet's file is put back");
    take(&mut disk, &steps(&way, true));
    assert!(is_at(&disk, NEW));
    // The token was removed, and stays so.
    disk.remove(&paths().bootstrap());
    assert!(is_at(&disk, NEW));
    moved(&mut disk, OLD, true);
    assert!(is_at(&disk, OLD) && disk.len() == 2);
}

#[test]
fn a_proof_that_fails_leaves_everything_as_it_was() {
    let mut disk = disk();
    moved(&mut disk, NEW, false);
    assert_eq!(disk, self::disk());
}

#[test]
fn ended_between_any_two_writes_a_second_move_finishes_or_undoes() {
    for proven in [true, false] {
        let all = steps(&plan_on(&disk(), NEW).unwrap(), proven);
        for done in 0..=all.len() {
            let mut ended = disk();
            take(&mut ended, &all[..done]);
            // It goes on to its target, back, or elsewhere. That may fail, or end early, too.
            for server in [NEW, OLD, OTHER] {
                let Some(way) = plan_on(&ended, server) else {
                    assert!(!ended.contains_key(&paths().before_move()), "{proven} {done} {server}");
                    continue;
                };
                let kept = ended.get(&paths().before_move());
                assert!(kept.is_none_or(|kept| kept == KUBECONFIG), "{proven} {done}: it is the first");
                let mut disk = ended.clone();
                take(&mut disk, &steps(&way, true));
                assert!(is_at(&disk, server), "{proven} {done} {server}: {disk:?}");
                assert!(server != OLD || disk == self::disk(), "{proven} {done}: {disk:?}");

                let mut disk = ended.clone();
                take(&mut disk, &steps(&way, false));
                let at = if proven && done == all.len() { NEW } else { OLD };
                assert!(is_at(&disk, at), "{proven} {done} {server}: {disk:?}");
                assert_eq!(way.from, at);

                for second in 0..=steps(&way, true).len() {
                    let mut disk = ended.clone();
                    take(&mut disk, &steps(&way, true)[..second]);
                    let Some(third) = plan_on(&disk, NEW) else { continue };
                    take(&mut disk, &steps(&third, true));
                    assert!(is_at(&disk, NEW), "{proven} {done} {server} {second}: {disk:?}");
                }
            }
        }
    }
}

#[test]
fn files_of_others_are_refused_by_their_name_and_without_their_content() {
    let two = "clusters: [{cluster: {server: 'https://a'}}, {cluster: {server: 'https://b'}}]";
    for bad in ["", "secret", "clusters: []", "clusters: {}", "clusters: [{cluster: {server: 7}}]", two] {
        let present = Present { kubeconfig: bad, before: None, bootstrap: None, record: RECORD };
        let error = plan(&present, NEW, &paths()).unwrap_err();
        assert_eq!(error, BadFile::Server { path: paths().kubeconfig() }, "{bad}");
        assert_eq!(server_of(bad), None);
    }
    let present =
        Present { kubeconfig: KUBECONFIG, before: None, bootstrap: Some("token: ["), record: RECORD };
    let error = plan(&present, NEW, &paths()).unwrap_err().to_string();
    assert!(error.contains("bootstrap-kubelet.conf: line") && !error.contains("token"), "{error}");
    let present = Present { record: "{}", ..present };
    assert!(plan(&Present { bootstrap: None, ..present }, NEW, &paths()).is_err());
    let before = Some("nothing");
    let error = plan(&Present { before, bootstrap: None, record: RECORD, ..present }, NEW, &paths());
    assert_eq!(error, Err(BadFile::Server { path: paths().before_move() }));
}

#[test]
fn a_kubelet_tells_how_it_is_where_its_configuration_says() {
    let at = |config: Value| health(&config).map(|address| address.to_string());
    assert_eq!(at(json!({})).as_deref(), Some("127.0.0.1:10248"));
    assert_eq!(at(json!({"healthzPort": 7, "healthzBindAddress": "::1"})).as_deref(), Some("[::1]:7"));
    assert_eq!(at(json!({"healthzPort": 0})), None);
    assert_eq!(at(json!({"healthzPort": 70_000})), None);
}
