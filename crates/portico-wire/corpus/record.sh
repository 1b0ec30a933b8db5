#!/usr/bin/env bash
# Records the hello corpus anew: every TLS client at hand opens one connection to a loopback port.
#
#   crates/portico-wire/corpus/record.sh [CLIENT...]
#
# Records all clients, or those whose files begin with these words.
#
# A client that is not installed is reported and its old recording kept. What to install on Debian 12:
#   apt-get install openssl gnutls-bin libnss3-tools curl python3 python3-venv nodejs golang \
#     openjdk-17-jdk-headless chromium
# A second JDK is taken from NEW_JAVA_HOME if that is set, kubectl from the PATH, rustls and pyOpenSSL from
# their registries.
# Writes hello/*.bin, expected.tsv (read by tests/hello_corpus.rs; look at its diff!) and versions.md.
set -euo pipefail
cd "$(dirname "$0")"
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
export CARGO_HOME=${CARGO_HOME:-$HOME/.cargo} RUSTUP_HOME=${RUSTUP_HOME:-$HOME/.rustup}
export HOME=$scratch/home # clients leave no traces in yours
mkdir -p "$HOME"
wanted=("$@")
name=wcx9k2tq7m.europe.kkp.example.com

cargo build -q --manifest-path ../Cargo.toml --example record_hello
target=$(cargo metadata --manifest-path ../Cargo.toml --no-deps --format-version 1 |
  sed 's/.*"target_directory":"\([^"]*\)".*/\1/')
recorder=$target/debug/examples/record_hello

touch expected.tsv
# record FILE PROGRAM ARGUMENT...: records one client and puts its line into expected.tsv.
record() {
  local file=$1.bin line
  shift
  if (( ${#wanted[@]} )) && ! printf '%s\n' "${wanted[@]}" | grep -q "^${file%%-*}$"; then return; fi
  if ! command -v "$1" >/dev/null; then
    echo "$file: $1 is not installed; the old recording stays" >&2
    return
  fi
  echo "== $file" >&2
  line=$("$recorder" "hello/$file" "$@")
  { grep -v "^$file"$'\t' expected.tsv || true; echo "$line"; } | LC_ALL=C sort > "$scratch/expected"
  cp "$scratch/expected" expected.tsv
}

connect=127.0.0.1:{port}
old=ALL:@SECLEVEL=0
record openssl-tls1.3 openssl s_client -connect $connect -servername $name -alpn h2,http/1.1
record openssl-tls1.2 openssl s_client -connect $connect -servername $name -tls1_2
record openssl-tls1.1 openssl s_client -connect $connect -servername $name -tls1_1 -cipher $old
record openssl-tls1.0 openssl s_client -connect $connect -servername $name -tls1 -cipher $old
record openssl-no-name openssl s_client -connect $connect -noservername
record openssl-upper-case openssl s_client -connect $connect -servername "${name^^}."
record openssl-fragmented openssl s_client -connect $connect -servername $name -max_send_frag 512 \
  -alpn "$(seq -s, -f "%0120g" 5)"
gnutls=(gnutls-cli --insecure --sni-hostname $name -p '{port}')
record gnutls-default "${gnutls[@]}" --alpn h2 --alpn http/1.1 127.0.0.1
record gnutls-tls1.2 "${gnutls[@]}" --priority NORMAL:-VERS-ALL:+VERS-TLS1.2 127.0.0.1
record gnutls-tls1.0 "${gnutls[@]}" --priority LEGACY:-VERS-ALL:+VERS-TLS1.0 127.0.0.1
record curl-https curl -sS --http2 --resolve "$name:{port}:127.0.0.1" "https://$name:{port}/version"
record python-ssl python3 clients/hello.py '{port}' $name
record node-tls node clients/hello.js '{port}' $name
record kubectl-version kubectl --server "https://$connect" --tls-server-name $name --token none \
  --insecure-skip-tls-verify --request-timeout 5s get --raw /version

if command -v java >/dev/null; then
  record java-default java clients/Hello.java '{port}' $name
  record java-tls1.2 java -Djdk.tls.client.protocols=TLSv1.2 clients/Hello.java '{port}' $name
fi
if [[ -n ${NEW_JAVA_HOME:-} ]]; then
  record java-new "$NEW_JAVA_HOME/bin/java" clients/Hello.java '{port}' $name
fi

if command -v go >/dev/null; then
  GOFLAGS=-buildvcs=false GOPATH=$scratch/go GOCACHE=$scratch/gocache \
    go build -o "$scratch/go-hello" clients/hello.go
  record go-default "$scratch/go-hello" '{port}' $name
  record go-tls1.2 "$scratch/go-hello" '{port}' $name 1.2
  record go-tls1.0 "$scratch/go-hello" '{port}' $name 1.0
fi

cargo build -q --manifest-path clients/rustls/Cargo.toml --target-dir "$target/corpus"
record rustls-default "$target/corpus/debug/rustls-client" '{port}' $name
record rustls-fragmented "$target/corpus/debug/rustls-client" '{port}' $name 64

python3 -m venv "$scratch/venv"
"$scratch/venv/bin/pip" install -q pyOpenSSL
record pyopenssl-default "$scratch/venv/bin/python" clients/hello.py '{port}' $name pyopenssl

if command -v tstclnt >/dev/null; then
  mkdir "$scratch/nss" && certutil -N -d "$scratch/nss" --empty-password
  record nss-default tstclnt -h 127.0.0.1 -p '{port}' -a $name -d "$scratch/nss" -o -Q
fi

record chromium-headless chromium --headless --no-sandbox --disable-gpu --disable-quic --no-first-run \
  --disable-background-networking --disable-component-update --disable-sync \
  --user-data-dir="$scratch/chromium" \
  --host-resolver-rules="MAP $name 127.0.0.1" --dump-dom "https://$name:{port}/"

# The versions of what was recorded, for the reader of the corpus. A run for some clients leaves them alone.
if (( ${#wanted[@]} )); then exit; fi
first_line() { { "$@" 2>&1 || true; } | head -1; }
{
  echo "# Clients in this corpus"
  echo
  echo "Written by \`record.sh\`."
  echo
  python='import sys,ssl; print("Python", sys.version.split()[0], "with", ssl.OPENSSL_VERSION)'
  node='process.version + " with OpenSSL " + process.versions.openssl'
  echo "- openssl: $(first_line openssl version)"
  echo "- curl: $(first_line curl --version | cut -d' ' -f1-4)"
  echo "- python: $(first_line python3 -c "$python")"
  echo "- node: Node.js $(first_line node -p "$node")"
  echo "- gnutls: $(first_line gnutls-cli --version)"
  echo "- nss: $(dpkg-query -W -f '${Package} ${Version}' libnss3 2>/dev/null || echo not recorded)"
  echo "- go: $(first_line go version)"
  echo "- kubectl: $(first_line kubectl version --client)"
  echo "- java: $(first_line java --version)"
  if [[ -n ${NEW_JAVA_HOME:-} ]]; then
    echo "- java-new: $(first_line "$NEW_JAVA_HOME/bin/java" --version)"
  fi
  rustls=$(grep -A1 '^name = "rustls"$' clients/rustls/Cargo.lock | tail -1 | cut -d'"' -f2)
  echo "- rustls: $rustls, aws-lc-rs, post-quantum preferred"
  pyopenssl='from OpenSSL import SSL; print(SSL.SSLeay_version(0).decode())'
  echo "- pyopenssl: $(first_line "$scratch/venv/bin/python" -c "$pyopenssl")"
  echo "- chromium: $(chromium --version --no-sandbox 2>/dev/null || echo not recorded)"
} > versions.md
