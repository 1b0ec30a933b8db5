//! How a member starts, by its data folder, the known state of the ring, and the answers of others. Pure.
//!
//! The caller does a step and asks again. So a launcher that was killed in between goes on where it was.

use std::fmt;
use std::fs;
use std::path::Path;

/// What a member has on its volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Folder {
    /// Nothing that etcd would go on with.
    Empty,
    /// A log of its own.
    Data,
}

impl Folder {
    /// As etcd itself judges it: by a file of the write-ahead log. One that cannot be looked at is taken to
    /// have data, and etcd says what is wrong with it.
    pub(crate) fn at(data_dir: &Path) -> Self {
        match fs::read_dir(data_dir.join("member/wal")) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Self::Empty,
            Err(_) => Self::Data,
            Ok(files) => {
                let is_log = |name: &Path| name.extension().is_some_and(|end| end == "wal");
                if files.flatten().any(|file| is_log(Path::new(&file.file_name()))) {
                    Self::Data
                } else {
                    Self::Empty
                }
            }
        }
    }
}

/// This member, as its flags have it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Own {
    pub(crate) name: String,
    pub(crate) peer_url: String,
    /// Names and URLs of the members of the first day, itself included.
    pub(crate) ring: Vec<(String, String)>,
}

/// A member of a ring that exists.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Member {
    pub(crate) id: u64,
    /// Empty for one that was added and has not started.
    pub(crate) name: String,
    pub(crate) peer_urls: Vec<String>,
    /// Whether it has published its client URLs to the other members, as each does once it has started.
    pub(crate) started: bool,
}

/// The members of a ring that has a leader; `None` if nobody knows of one.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Answer(pub(crate) Option<Vec<Member>>);

/// What to do next.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Step {
    /// Start with what is in the folder.
    AsItIs,
    /// Start as one of the first members.
    New,
    /// Start as a member of this ring, which has the data.
    Existing {
        ring: String,
    },
    /// Take the member that had this one's place from the ring: its data is gone.
    Remove {
        id: u64,
    },
    /// Become a member that gets the data and does not vote yet.
    Add,
    /// Ask again later.
    Wait,
    Refuse(String),
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::AsItIs => f.write_str("starting etcd with the data that is there"),
            Self::New => f.write_str("starting etcd as a member of a new ring"),
            Self::Existing { ring } => write!(f, "starting etcd as a member of the ring {ring}"),
            Self::Remove { id } => write!(f, "the data of member {id:x} is gone: removing it from its ring"),
            Self::Add => f.write_str("adding this member to its ring, as a learner"),
            Self::Wait => f.write_str(
                "the ring has held data, the folder is empty, and no other member knows a leader: waiting \
                 for a majority. If their volumes are gone too, restore the ring from a backup",
            ),
            Self::Refuse(why) => f.write_str(why),
        }
    }
}

/// What to do next. A new ring begins only where nobody knows of one: a second one, empty and under the same
/// name, would look well.
pub(crate) fn decide(own: &Own, folder: Folder, initialized: bool, Answer(members): &Answer) -> Step {
    if folder == Folder::Data {
        return Step::AsItIs;
    }
    let alone = own.ring.len() == 1;
    match members {
        None if !initialized => Step::New,
        None if alone => Step::Refuse(
            "the folder of the only member is empty, and the ring has held data: restore the volume, or its \
             content, under the same name; nothing is made in its place"
                .to_owned(),
        ),
        None => Step::Wait,
        Some(members) => match own.registered(members) {
            Some(member) if member.started => Step::Remove { id: member.id },
            Some(_) => Step::Existing { ring: own.ring_of(members) },
            None if members.len() < own.ring.len() => Step::Add,
            None => Step::Refuse(format!(
                "{} is none of the members of its ring, which is complete: {}; remove one that does not \
                 belong there (etcdctl member remove)",
                own.name,
                own.ring_of(members)
            )),
        },
    }
}

impl Own {
    /// The member that is registered with this one's URL, or else with its name.
    fn registered<'a>(&self, members: &'a [Member]) -> Option<&'a Member> {
        let by_url = members.iter().find(|member| member.peer_urls.contains(&self.peer_url));
        by_url.or_else(|| members.iter().find(|member| member.name == self.name))
    }

    /// For `--initial-cluster`. etcd demands every member of the ring, and its own name for itself.
    fn ring_of(&self, members: &[Member]) -> String {
        let named = members.iter().flat_map(|member| {
            member.peer_urls.iter().map(move |url| {
                let first = self.ring.iter().find(|(_, known)| known == url).map(|(name, _)| &**name);
                let name = if member.name.is_empty() { first.unwrap_or("unknown") } else { &*member.name };
                format!("{}={url}", if *url == self.peer_url { &*self.name } else { name })
            })
        });
        named.collect::<Vec<_>>().join(",")
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn url(number: u64) -> String {
        format!("https://etcd-{number}:2380")
    }

    fn own(size: u64) -> Own {
        let ring = (0..size).map(|number| (format!("etcd-{number}"), url(number))).collect();
        Own { name: "etcd-0".to_owned(), peer_url: url(0), ring }
    }

    fn member(number: u64, started: bool) -> Member {
        Member { id: 100 + number, name: format!("etcd-{number}"), peer_urls: vec![url(number)], started }
    }

    fn decided(size: u64, initialized: bool, members: Option<Vec<Member>>) -> Step {
        decide(&own(size), Folder::Empty, initialized, &Answer(members))
    }

    #[test]
    fn first_members_begin_a_new_ring() {
        assert_eq!(decided(1, false, None), Step::New);
        assert_eq!(decided(3, false, None), Step::New);
    }

    #[test]
    fn a_late_first_member_joins_the_ring_of_the_others() {
        let members = vec![member(0, false), member(1, true), member(2, true)];
        let ring = "etcd-0=https://etcd-0:2380,etcd-1=https://etcd-1:2380,etcd-2=https://etcd-2:2380";
        assert_eq!(decided(3, false, Some(members)), Step::Existing { ring: ring.to_owned() });
    }

    #[test]
    fn a_member_that_lost_its_data_is_removed_added_and_started() {
        let others = [member(1, true), member(2, true)];
        let lost = [&[member(0, true)][..], &others].concat();
        assert_eq!(decided(3, true, Some(lost)), Step::Remove { id: 100 });
        assert_eq!(decided(3, true, Some(others.to_vec())), Step::Add);
        let added = Member { name: String::new(), ..member(0, false) };
        let Step::Existing { ring } = decided(3, true, Some([&others[..], &[added]].concat())) else {
            panic!("it starts");
        };
        assert!(ring.ends_with("etcd-0=https://etcd-0:2380"), "{ring}");
    }

    #[test]
    fn what_has_held_data_is_not_begun_anew() {
        assert!(matches!(decided(1, true, None), Step::Refuse(why) if why.contains("restore the volume")));
        assert_eq!(decided(3, true, None), Step::Wait);
    }

    #[test]
    fn a_ring_of_others_is_left_alone() {
        let step = decided(3, true, Some(vec![member(1, true), member(2, true), member(3, true)]));
        assert!(matches!(step, Step::Refuse(why) if why.contains("etcdctl member remove")));
    }

    #[test]
    fn a_folder_has_data_once_it_has_a_log() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(Folder::at(folder.path()), Folder::Empty);
        fs::create_dir_all(folder.path().join("member/wal")).unwrap();
        assert_eq!(Folder::at(folder.path()), Folder::Empty);
        fs::write(folder.path().join("member/wal/0000000000000000-0000000000000000.wal"), "").unwrap();
        assert_eq!(Folder::at(folder.path()), Folder::Data);
    }

    fn any_member() -> impl Strategy<Value = Member> {
        (0..6_u64, any::<bool>(), any::<bool>()).prop_map(|(number, started, named)| {
            let name = if named { format!("etcd-{number}") } else { String::new() };
            Member { name, ..member(number, started) }
        })
    }

    proptest! {
        #[test]
        fn no_second_ring_is_ever_begun_and_only_its_own_place_is_taken(
            size in (0..3_usize).prop_map(|index| [1_u64, 3, 5][index]),
            data in any::<bool>(),
            initialized in any::<bool>(),
            members in proptest::option::of(proptest::collection::vec(any_member(), 1..6)),
        ) {
            let folder = if data { Folder::Data } else { Folder::Empty };
            let step = decide(&own(size), folder, initialized, &Answer(members.clone()));
            prop_assert_eq!(data, step == Step::AsItIs);
            if step == Step::New {
                prop_assert!(!initialized && members.is_none());
            }
            if let Step::Remove { id } = step {
                prop_assert_eq!(id, 100);
            }
        }

        /// The others are a majority, and do what they are asked.
        #[test]
        fn whatever_is_left_of_its_place_it_starts_after_two_steps_at_most(
            left in 0..4_u8, initialized in any::<bool>(),
        ) {
            let mut members = vec![member(1, true), member(2, true)];
            match left {
                0 => {}
                1 => members.push(member(0, true)),
                2 => members.push(member(0, false)),
                _ => members.push(Member { name: String::new(), ..member(0, false) }),
            }
            for _ in 0..3 {
                match decided(3, initialized, Some(members.clone())) {
                    Step::Remove { id } => members.retain(|member| member.id != id),
                    Step::Add => members.push(Member { name: String::new(), id: 7, ..member(0, false) }),
                    step => {
                        prop_assert!(matches!(step, Step::Existing { .. }), "{step}");
                        return Ok(());
                    }
                }
            }
            prop_assert!(false, "it does not start");
        }
    }
}
