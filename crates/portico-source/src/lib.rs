//! Where objects come from: a directory of manifests, or a Kubernetes API.
