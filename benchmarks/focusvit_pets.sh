#!/usr/bin/env bash
# FocusViT's experiment on Oxford-IIIT Pet with ViT-B/16, from the fine-tuning to the tables, in one command:
#
#   benchmarks/focusvit_pets.sh WEIGHTS.safetensors OXFORD-IIIT-PET OUT
#
# WEIGHTS   a state dict of timm's vit_base_patch16_224 with 1000 classes, in float16 or float32; or a model's name
# PET       images/ and annotations/ with test.txt and trimaps/; where trainval.txt is there, all of it is trained on
# OUT       gets focusvit.md, focusvit.json and focusvit-radar.png (below 1 MB); model and store stay in WORK
#
# Without trainval.txt, TRAINING of the 3,669 photos of the test split are trained on (a tenth of each class of them
# decides when to stop), and LIMIT others are used: VALIDATION of these choose m*, the rest, 50, is scored. The result
# says so. The defaults are for some five minutes of one H200: 30 s for reading, 1 to 1.5 min for the epochs, half a
# minute for m* (12 starts, 217 forwards an image), 2 to 3 min for 50 images at effort usual (7,000 forwards an image in
# float32, most of them LIME's and SHAP's; LIME's superpixels are found on all cores). More images cost 4 s each;
# EFFORT=quick takes a tenth of that, with 30 samples for LIME and 40 for SHAP. A run that was stopped goes on in WORK.
#
# Needs, beside torch, torchvision, timm and safetensors: numpy scipy pillow matplotlib typer rich lazy-loader pydantic
# (pip install clairvit) and pyarrow duckdb jinja2 filelock (clairvit[study]) scikit-image (clairvit[superpixels]).
#
# The same in small, on a CPU, with the built-in model:
#   DEVICE=cpu TRAINING=100 EPOCHS=1 LIMIT=10 VALIDATION=4 EFFORT=quick benchmarks/focusvit_pets.sh pets PET out/small
set -euo pipefail
cd "$(dirname "$0")/.."
weights=$1 data=$2 out=$3
work=${WORK:-out/focusvit-pets}
python=${PYTHON:-python3}
"$python" - <<'PY'
import importlib.util
import sys

needed = "scipy matplotlib typer rich lazy_loader pydantic pyarrow duckdb jinja2 filelock skimage safetensors timm"
missing = [name for name in needed.split() if importlib.util.find_spec(name) is None]
sys.exit(f"These packages are missing: {', '.join(missing)}; install them first." if missing else 0)
PY
case $weights in
  *.safetensors) model=(--model "file:$weights" --arch timm:vit_base_patch16_224) ;;
  *) model=(--model "$weights") ;;
esac
mkdir -p "$out"
status=0
# "Normalisation was applied using ImageNet mean and standard deviation" (section 4), not by the weights' own 0.5
PYTHONPATH=src${PYTHONPATH:+:$PYTHONPATH} "$python" -m clairvit reproduce focusvit --data "pets:$data" "${model[@]}" \
  --mean 0.485,0.456,0.406 --std 0.229,0.224,0.225 --finetune --training "${TRAINING:-2400}" --epochs "${EPOCHS:-50}" \
  --limit "${LIMIT:-250}" --validation "${VALIDATION:-200}" --effort "${EFFORT:-usual}" --cost \
  --device "${DEVICE:-cuda}" --out "$work" || status=$?
cp "$work"/focusvit.md "$work"/focusvit.json "$work"/focusvit-*.png "$out"
exit "$status"
