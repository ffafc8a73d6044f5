#!/usr/bin/env bash
# Takes the records of docs/results anew on a machine with one GPU; tools/figures.py draws them then.
#
#   tools/records.sh OUT PART...     writes into the folder OUT; COMMIT names the source of an export
#
# Each part takes under ten minutes on an H200:
#   vectors      what the intrinsics do (then: cp OUT/vectors.npz tests/emulator)
#   check        gpu_check.sh: all kernels against float64, tests/gpu, four sanitizers
#   kernelbench  the ModelNew files as KernelBench runs them
#   forward      TF32, every peer
#   gradients    TF32, cuDNN in both formats
#   train        whole training steps, TF32 and bfloat16
#   half         bfloat16 and float16, forward, both formats
#   halfgrad     bfloat16, gradients
#   others       layers that nobody tuned for, TF32, bfloat16 and float32, forward
#   ieee         float32 without TF32, all passes
#   conv         the named Conv3d layers: TF32, both formats, all passes
#   convhalf     the same in bfloat16
#   convtuned    both, with our layers under torch.backends.cudnn.benchmark = True (four times 220 s)
#   transposedtuned  gradients and steps of the transposed layers in channels_last, likewise
#   convtriton   the Conv3d layers forward, torch.compile with max_autotune alone (minutes of tuning)
#   networks     the U-Net as built and converted, compiled: TF32 and bfloat16, both formats
#   networks-eager  the same in eager mode
#   fused        U-Net, generator and DynUNet, compiled; the backend that fuses epilogues beside
#   timed        networks of few layers, eager, with our layers under cudnn.benchmark
#   graphs       networks that wait for the host, compiled steps as CUDA graphs
#   models       networks of libraries: model_bench.py
#   training     loss curves and step times: training_check.py
#   distributed  two GPUs or more: distributed_check.py
set -u
out=${1:?usage: tools/records.sh OUT PART...}
shift
cd "$(dirname "$0")/.."
mkdir -p "$out"
export PYTHONPATH=src:tests${PYTHONPATH:+:$PYTHONPATH}
commit=${COMMIT:-$(git rev-parse HEAD)}
cudnn=default,cudnn_benchmark,cudnn_channels_last
failed=0
# Other kernels, strides, dilations, groups and channels than the benchmark's.
others=(
  --shape n=4,in=48,out=24,size=32x48x40,k=4,s=2,p=1
  --shape n=2,in=64,out=32,size=24x40x40,k=5,s=2,p=2,op=1
  --shape n=2,in=32,out=16,size=28x36x44,k=7,s=2,p=3,op=1
  --shape n=2,in=32,out=48,size=20x32x32,k=5,s=3,p=1
  --shape n=2,in=96,out=48,size=16x40x48,k=1x2x2,s=1x2x2
  --shape n=2,in=64,out=64,size=20x50x50,k=1x3x3,s=1x2x2,p=0x1x1,op=0x1x1
  --shape n=2,in=64,out=64,size=40,k=3,p=1,g=2
  --shape n=2,in=64,out=64,size=32,k=3,s=2,p=1,op=1,g=8
  --shape n=4,in=3,out=64,size=64,k=3,p=1
  --shape n=2,in=64,out=1,size=48,k=4,s=2,p=1
  --shape n=2,in=32,out=1,size=64,k=3,p=1
  --shape n=2,in=64,out=64,size=30x40x50,k=5,p=2
  --shape n=2,in=32,out=32,size=40,k=7,p=3
  --shape n=1,in=128,out=128,size=24x56x56,k=3x5x5,p=1x2x2
  --shape n=2,in=256,out=128,size=12,k=4,s=2,p=1
  --shape n=2,in=48,out=96,size=32,k=3,s=3
  --shape n=2,in=40,out=40,size=33x47x51,k=3,d=2,p=2
  --shape n=8,in=16,out=3,size=64,k=4,s=2,p=1
  --shape n=1,in=192,out=96,size=20x24x28,k=2,s=2
  --shape n=2,in=64,out=32,size=24x40x40,k=4,s=4
  --shape n=2,in=64,out=64,size=32,k=3,p=1,g=64
  --shape n=2,in=24,out=24,size=40,k=5,s=2,p=2,g=2
  --shape n=2,in=128,out=128,size=16,k=3,p=1
  --shape n=2,in=64,out=32,size=32,k=3,s=2,p=1,op=1
  --shape n=2,in=32,out=16,size=48,k=3,s=2,p=1,op=1
  --shape n=2,in=512,out=256,size=8,k=3,s=2,p=1,op=1
  --shape n=2,in=16,out=16,size=64,k=5,p=2
  --shape n=2,in=96,out=96,size=24,k=5,s=2,p=2,op=1
  --shape n=2,in=128,out=64,size=20,k=5,p=2,g=2
  --shape n=2,in=128,out=64,size=20,k=4,s=2,p=1,g=8
  --shape n=2,in=128,out=128,size=16x32x32,k=1x4x4,s=1x2x2,p=0x1x1
  --shape n=2,in=64,out=64,size=16x32x32,k=3x1x1,s=2x1x1,p=1x0x0,op=1x0x0
  --shape n=4,in=3,out=32,size=32x48x48,k=4,s=2,p=1
  --shape n=4,in=3,out=64,size=48,k=7,p=3
  --shape n=2,in=32,out=3,size=48,k=7,p=3
  --shape n=2,in=64,out=32,size=24,k=7,s=3,p=2
  --shape n=2,in=48,out=32,size=24,k=4,s=3
  --shape n=2,in=80,out=40,size=25x35x45,k=3,s=2,p=1,op=1
  --shape n=2,in=64,out=64,size=28,k=3x5x7,s=1x2x3,p=1x2x3
  --shape n=2,in=32,out=32,size=32,k=4,s=2,p=1,g=2
  --shape n=1,in=32,out=32,size=96,k=3,p=1
  --shape n=2,in=24,out=24,size=40,k=5,p=2,g=8
  --shape n=2,in=64,out=1,size=64,k=2,s=2
  --shape n=2,in=128,out=1,size=32,k=4,s=2,p=1
  --shape n=2,in=256,out=256,size=10x12x14,k=3,p=1
  --shape n=8,in=64,out=64,size=16,k=3,s=2,p=1
)

bench() {  # name, then options
  local name=$1
  shift
  (cd "$out" && PYTHONPATH=$root/src:$PYTHONPATH python3 -m convt3d bench --commit "$commit" \
    --out "$name.json" --resume "$@") || failed=1
}

conv() {  # name, then options
  bench "$@" --layout ncdhw,ndhwc --pass forward,grad_input,grad_weight \
    --budget 0.05 --peers $cudnn
}

networks() {  # options
  bench networks-h200 --model unet --dtype tf32,bf16 --layout ncdhw,ndhwc --budget 0.5 "$@"
}

root=$PWD
for part in "$@"; do
  echo "== $part (after ${SECONDS} s)"
  case $part in
    vectors) python3 -m emulator.record_vectors --output "$out/vectors.npz" || failed=1 ;;
    check) bash tools/gpu_check.sh "$out/gpu-check.txt" || failed=1 ;;
    kernelbench)
      python3 tools/kernelbench_check.py --commit "$commit" --out "$out/kernelbench-level1.json" ||
        failed=1
      python3 tools/kernelbench_check.py --level2 --commit "$commit" \
        --out "$out/kernelbench-level2.json" || failed=1 ;;
    forward) bench h200-forward-tf32 --dtype tf32 --pass forward ;;
    gradients)
      bench h200-gradients-tf32 --dtype tf32 --pass grad_input,grad_weight --peers $cudnn ;;
    train) bench h200-train --dtype tf32,bf16 --pass train --peers $cudnn ;;
    half)
      bench h200-forward-bf16 --dtype bf16 --pass forward --layout ncdhw,ndhwc
      bench h200-forward-fp16 --dtype fp16 --pass forward --layout ncdhw,ndhwc --peers $cudnn ;;
    halfgrad) bench h200-gradients-bf16 --dtype bf16 --pass grad_input,grad_weight --peers $cudnn ;;
    others)
      bench h200-others-tf32 --dtype tf32 --pass forward --budget 0.1 --peers $cudnn "${others[@]}"
      bench h200-others-bf16 --dtype bf16 --pass forward --budget 0.1 --peers $cudnn "${others[@]}"
      bench h200-others-fp32 --dtype fp32 --pass forward --budget 0.1 --peers $cudnn "${others[@]}" ;;
    ieee)
      bench h200-forward-fp32 --dtype fp32 --pass forward --peers $cudnn
      bench h200-gradients-fp32 --dtype fp32 --pass grad_input,grad_weight --peers $cudnn ;;
    conv) conv h200-conv-tf32 --dtype tf32 --shape conv ;;
    convhalf) conv h200-conv-bf16 --dtype bf16 --shape conv ;;
    convtuned)  # without conv_vit_patch: cuDNN's own choice by timing takes minutes there
      # shellcheck disable=SC2207
      shapes=($(python3 -c '
from convt3d.bench import shapes
names = (shape.name for shape in shapes.select(["conv"]) if shape.name != "conv_vit_patch")
print(*(f"--shape {name}" for name in names))')) || { failed=1 && continue; }
      for mode in tf32 bf16; do
        for layout in ncdhw,cudnn_benchmark ndhwc,cudnn_channels_last; do
          bench "conv-tuned-$mode-${layout%,*}" --dtype $mode --tune --layout "${layout%,*}" \
            --pass forward,grad_input,grad_weight --budget 0.05 \
            --peers "default,${layout#*,}" "${shapes[@]}"
        done
      done
      python3 tools/tuned_rows.py "$out/conv-tuned.json" "$out"/conv-tuned-{tf32,bf16}-*.json ||
        failed=1 ;;
    transposedtuned)
      for mode in tf32 bf16; do
        bench "transposed-tuned-$mode" --dtype $mode --tune --layout ndhwc \
          --pass grad_input,grad_weight,train --budget 0.05 --peers default,cudnn_channels_last
      done
      python3 tools/tuned_rows.py "$out/transposed-tuned.json" "$out"/transposed-tuned-{tf32,bf16}.json ||
        failed=1 ;;
    convtriton)
      bench h200-conv-tf32 --shape conv --layout ncdhw,ndhwc --dtype tf32 --pass forward \
        --budget 0.05 --no-ours --peers max_autotune
      bench h200-conv-bf16 --shape conv --layout ncdhw,ndhwc --dtype bf16 --pass forward \
        --budget 0.05 --no-ours --peers max_autotune ;;
    networks) networks --compile ;;
    fused)
      bench networks-fused --model unet,gan --compile --once --fused --dtype tf32,bf16 --budget 0.3
      python3 tools/model_bench.py --networks "MONAI DynUNet" --compile --once --fused \
        --budget 0.3 --commit "$commit" --out "$out/networks-fused.json" || failed=1 ;;
    timed)
      python3 tools/model_bench.py --networks "gan,pangu-recovery,MONAI UNet" --no-compile --once \
        --tune --budget 0.3 --commit "$commit" --out "$out/networks-timed.json" || failed=1 ;;
    graphs)
      for graphs in "" --graphs; do  # each network compiles for a minute and more
        # shellcheck disable=SC2086
        python3 tools/model_bench.py --networks "MONAI BasicUNet,MONAI UNet" --mode bf16 --compile \
          $graphs --kinds training --once --budget 0.3 --commit "$commit" \
          --out "$out/networks-graphs.json" || failed=1
      done ;;
    networks-eager) networks --no-compile ;;
    models)
      python3 tools/model_bench.py --budget 0.5 --once --compile --commit "$commit" \
        --out "$out/networks-libraries-h200.json" || failed=1 ;;
    training)
      python3 tools/training_check.py --no-tuning --commit "$commit" \
        --out "$out/training-h200.json" || failed=1 ;;
    distributed)
      python3 tools/distributed_check.py --no-tuning --commit "$commit" \
        --out "$out/distributed-h200.json" || failed=1 ;;
    *) echo "no part $part" && exit 2 ;;
  esac
done
exit $failed
