#!/usr/bin/env bash
# Runs every fuzz target of the repository for some seconds each, as many at a time as there are cores.
#
#   fuzz/run.sh [SECONDS] [CRATE...]      default: 30 s each, all crates with a fuzz folder
#   FUZZ_TARGETS="client_hello ..."       only these targets
#
# Works with the pinned stable toolchain and a C++ compiler, without cargo-fuzz: it builds with the coverage
# flags that cargo-fuzz would pass. Memory is safe by the compiler (no crate with a target has unsafe code),
# so no sanitizer is used; debug assertions and overflow checks are on. The folders are laid out as cargo-fuzz
# likes them.
#
# A folder crates/CRATE/fuzz holds:
#   fuzz_targets/TARGET.rs     one binary each, named in its Cargo.toml
#   seeds/TARGET/              inputs to start from (committed)
#   artifacts/TARGET/          inputs that failed (not committed; make each a unit test)
# What the fuzzer finds new paths with is kept in target/fuzz/corpus/CRATE/TARGET between runs.
#
# Exit code: 0 nothing found, 1 something failed (all targets are run all the same), 2 nothing to run or no
# build.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
cd "$root"
seconds=${1:-30}
[[ $seconds =~ ^[0-9]+$ ]] || { echo "usage: fuzz/run.sh [SECONDS] [CRATE...]" >&2; exit 2; }
shift || true

if (( $# )); then crates=("$@"); else
  crates=()
  for manifest in crates/*/fuzz/Cargo.toml; do crates+=("$(basename "${manifest%/fuzz/Cargo.toml}")"); done
fi

host=$(rustc -vV | sed -n 's/^host: //p')
target_dir=$root/target/fuzz
# Coverage for libFuzzer: counters and comparisons. --target keeps the flags away from build scripts.
coverage="--cfg fuzzing -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4
  -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table
  -Cllvm-args=-sanitizer-coverage-trace-compares"

# run CRATE TARGET: says how it went in one piece, and takes its file out of $failures if it went well.
run() {
  local crate=$1 target=$2 folder=$root/crates/$1/fuzz corpus=$target_dir/corpus/$1/$2 log report
  mkdir -p "$corpus" "$folder/artifacts/$target"
  local inputs=("$corpus")
  if [[ -d $folder/seeds/$target ]]; then inputs+=("$folder/seeds/$target/"); fi
  log=$target_dir/$crate-$target.log
  # An input over the caps of the parsers (64 KiB), 5 s for one input and 1 GiB are failures, not patience.
  local limits=(-max_total_time="$seconds" -max_len=70000 -timeout=5 -rss_limit_mb=1024)
  if "$target_dir/$host/release/$target" "${inputs[@]}" "${limits[@]}" -print_final_stats=1 \
    -artifact_prefix="$folder/artifacts/$target/" >"$log" 2>&1; then
    report=$(sed -n -e 's/^stat::number_of_executed_units: */   inputs tried: /p' \
      -e 's/^stat::average_exec_per_sec: */   a second: /p' "$log")
    rm "$failures/$crate-$target"
  else
    report=$(tail -40 "$log")
  fi
  printf '== %s: %s, %s s\n%s\n' "$crate" "$target" "$seconds" "$report"
}

failures=$(mktemp -d)
trap 'rm -rf "$failures"' EXIT
packages=()
for crate in "${crates[@]}"; do
  [[ -f $root/crates/$crate/fuzz/Cargo.toml ]] || { echo "$crate has no folder fuzz" >&2; exit 2; }
  packages+=(-p "$crate-fuzz")
done
# At once, so that what several of them need is built once.
RUSTFLAGS=$(echo $coverage) cargo build -q --release --locked --manifest-path "$root/fuzz/Cargo.toml" \
  "${packages[@]}" --target "$host" --target-dir "$target_dir" || exit 2
ran=0
for crate in "${crates[@]}"; do
  folder=$root/crates/$crate/fuzz
  for source in "$folder"/fuzz_targets/*.rs; do
    target=$(basename "$source" .rs)
    if [[ -n ${FUZZ_TARGETS:-} && " $FUZZ_TARGETS " != *" $target "* ]]; then continue; fi
    ran=$((ran + 1))
    if (( $(jobs -rp | wc -l) >= $(nproc) )); then wait -n || true; fi
    # Failed until it went well: `wait` says nothing of a run that ends before its target begins.
    echo "$crate: $target" >"$failures/$crate-$target"
    run "$crate" "$target" &
  done
done
wait

(( ran )) || { echo "no fuzz target of that name" >&2; exit 2; }
if [[ -n $(ls -A "$failures") ]]; then
  sed 's/^/FAILED: /' "$failures"/* >&2
  echo "The input is in artifacts/; run target/fuzz/$host/release/TARGET FILE to see it again." >&2
  exit 1
fi
