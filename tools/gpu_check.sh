#!/usr/bin/env bash
# Everything that needs a GPU, in one call: tests/gpu, then compute-sanitizer over every kernel.
#   tools/gpu_check.sh REPORT     writes a one-page report and fails if anything did
#   EACH=1                        one problem of each kernel and dtype, not all, against float64
#   PLANS=FILE                    the problems' plans, kept by an earlier run of kernel_check.py
set -u
report=${1:?usage: tools/gpu_check.sh REPORT}
cd "$(dirname "$0")/.."
export PYTHONPATH=src:tests${PYTHONPATH:+:$PYTHONPATH}
failed=0
trap 'kill $(jobs -p) 2> /dev/null' EXIT

say() { echo "$*" | tee -a "$report"; }
: > "$report"
say "GPU check of ${COMMIT:-$(git rev-parse --short HEAD 2> /dev/null || echo 'an exported tree')}"
say "$(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader)"
say "$(python3 -c 'import torch, cuda.core; print("torch", torch.__version__, "cuda-core", cuda.core.__version__)')"

python3 -m pytest tests/gpu -q -n "${WORKERS:-8}" -m "" -p no:cacheprovider \
  --deselect tests/gpu/test_runtime.py > /tmp/gpu_tests.log 2>&1 &
tests=$!

say "== every kernel against float64, poisoned outputs"
check="python3 tools/kernel_check.py --cases --plans ${PLANS:-$(mktemp -u)}"
$check ${EACH:+--each} > /tmp/cases.log 2>&1 || failed=1
grep -E "^(WRONG|ERROR|COMPILE)" /tmp/cases.log | cut -c1-250 | tee -a "$report"
grep -E "problems|checked" /tmp/cases.log | tee -a "$report"

# One problem of each kernel, arithmetic, layout, epilogue and way to fill again, from the cache that the run above
# filled; each tensor is an allocation of its own, so that no access past its end lands in another one.
last=${SANITIZED_GPU:-$(($(nvidia-smi -L | wc -l) - 1))}
tools=${TOOLS:-memcheck racecheck initcheck synccheck}
for tool in $tools; do
  # API errors are cuda.bindings asking the driver for functions that it may lack.
  CUDA_VISIBLE_DEVICES=$last PYTORCH_NO_CUDA_MEMORY_CACHING=1 timeout "${LIMIT:-400}" compute-sanitizer --tool "$tool" \
    --kernel-regex kns=convt3d --report-api-errors no --error-exitcode 9 \
    $check --each --no-reference > "/tmp/$tool.log" 2>&1 &
  declare "process_$tool=$!"
done
for tool in $tools; do
  process="process_$tool"
  say "== compute-sanitizer --tool $tool"
  wait "${!process}" || { failed=1; say "exit code $?"; }
  grep -E "^ERROR|checked|SUMMARY" "/tmp/$tool.log" | cut -c1-250 | tee -a "$report"
done
say "== tests/gpu"
wait "$tests" || failed=1
grep -E "^(FAILED|ERROR)" /tmp/gpu_tests.log | cut -c1-250 | tee -a "$report"
say "$(tail -1 /tmp/gpu_tests.log)"
# Alone: it measures what a call costs.
python3 -m pytest tests/gpu/test_runtime.py -q -s -p no:cacheprovider > /tmp/gpu_runtime.log 2>&1 || failed=1
grep -E "^(FAILED|ERROR)|CPU cost" /tmp/gpu_runtime.log | cut -c1-250 | tee -a "$report"
say "$(tail -1 /tmp/gpu_runtime.log)"
[ "$failed" = 0 ] && say "all clean" || say "SOMETHING FAILED"
exit "$failed"
