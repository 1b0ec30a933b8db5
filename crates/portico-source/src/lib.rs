//! Where objects come from: a directory of manifests, or a Kubernetes API.
//!
//! Both deliver the same thing: [`step::Step`]s of [`object::Object`]s that came, changed or went. [`directory`] watches a
//! directory and [`load`] reads one once; [`kubernetes`] watches an API server; [`state`] keeps the little that must outlive a
//! restart beside a directory.
//!
//! Inside, text passes through `yaml` (trees with lines, within bounds) and `manifest` (objects of a file) to `catalogue` (which file
//! holds what, and what changed); `walk`, `watch` and `pending` say which files to look at, and when. For an API server, `served` is how its objects are read
//! and `mirror` what follows from what its watches hear.
//!
//! What the objects mean is decided elsewhere: `portico-expose` plans, `portico-routes` routes.

pub mod directory;
#[cfg(feature = "kubernetes")]
pub mod kubernetes;
pub mod load;
pub mod object;
pub mod state;
pub mod step;

mod catalogue;
mod manifest;
#[cfg(feature = "kubernetes")]
mod mirror;
mod pending;
#[cfg(feature = "kubernetes")]
mod served;
mod walk;
mod watch;
mod yaml;

pub use directory::DirectorySource;
#[cfg(feature = "kubernetes")]
pub use kubernetes::{KubernetesSettings, KubernetesSource};
pub use load::{Loaded, Location, read_directory};
pub use object::Object;
pub use step::{Event, ManifestProblem, Step};
