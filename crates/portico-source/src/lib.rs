//! Where objects come from: a directory of manifests, or a Kubernetes API.
//!
//! Both deliver [`step::Step`]s of changed [`object::Object`]s. [`directory`] watches a directory and
//! [`load`] reads one once. [`kubernetes`] watches an API server and [`list`] lists it once. [`state`] is a
//! file for what must outlive a restart beside a directory.
//!
//! Text passes through [`portico_yaml`] (trees with lines, within bounds) and `manifest` (the objects of a
//! file). `index` then says which file holds which object, and what changed. `walk`, `watch` and `debounce`
//! say which files to read, and when. For an API server, [`served`] is the form in which its objects are
//! read, and `reflector` says what follows from a watch event.
//!
//! The meaning of objects is decided elsewhere: `portico-expose` plans, `portico-routes` routes.

pub mod directory;
#[cfg(feature = "kubernetes")]
pub mod kubernetes;
#[cfg(feature = "kubernetes")]
pub mod list;
pub mod load;
pub mod object;
pub mod problem_log;
#[cfg(feature = "kubernetes")]
pub mod served;
pub mod state;
pub mod step;

mod debounce;
mod index;
mod manifest;
mod problems;
#[cfg(feature = "kubernetes")]
mod reflector;
mod walk;
mod watch;

pub use directory::DirectorySource;
#[cfg(feature = "kubernetes")]
pub use kubernetes::{KubernetesSettings, KubernetesSource};
#[cfg(feature = "kubernetes")]
pub use list::{ListError, list_objects};
pub use load::{Loaded, Location, read_directory};
pub use object::Object;
pub use problem_log::ProblemLog;
#[cfg(feature = "kubernetes")]
pub use reflector::invalid;
pub use step::{ManifestProblem, Step};
