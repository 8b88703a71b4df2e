"""Where papers and public code disagree about a method, and what ClairViT does. One entry a method, for the docs.

Kept together because they were found together: reading papers against code. A method may also say it where it is
registered (`discrepancies=`).
"""

from __future__ import annotations

_LRP_FILES = (
    "The authors' repository has two rule files: one normalises positive and negative inputs of a linear "
    "layer apart, so that relevance can double; their sums are rescaled over the batch, which is right for "
    "one image only."
)
_RELU = "pytorch-grad-cam clips, rescales each layer and each image to 0…1; here the map stays as the formula gives it."

KNOWN = {
    "rollout": (
        "The CMI report and Joita multiply the layers in forward order, which reads another row of another "
        "product (preset `joita`); the CMI report's alpha=1 drops the residual (preset `cmi`); vit-explain "
        "divides columns instead of rows when entries are discarded (preset `jacobgil`); Chefer's scripts "
        "skip the first block."
    ),
    "attention-flow": (
        "All five papers call it too slow and leave it out of their comparisons; the definition is clear."
    ),
    "genatt": (
        "Not row-normalised, unlike rollout in the same authors' code; their CLIP notebook uses the last layer only."
    ),
    "gradsam": (
        "No official code was found. The paper averages over all queries; SkipPLUS reads the CLS row "
        "(preset `skipplus`) and calls that GenAtt+PLUS."
    ),
    "grad-rollout": (
        "Three methods share the name. vit-explain pairs the layers' attention with gradients in reverse "
        "order and takes the ReLU after the head mean (preset `jacobgil`); the CMI report fuses A and G "
        "apart and has no identity, so the product vanishes (preset `cmi`); here: right pairs, ReLU a head, "
        "residual."
    ),
    "attcam": (
        "Chefer's code calls it GradCAM; Coporan's code ships it as CAM and AG-CAM; SkipPLUS drops the "
        "ReLU, as a combinator does here."
    ),
    "gmar-l1": (
        "Alpha, normalisation and order are not stated in what could be read. Joita's code averages the "
        "weighted heads (1/H too little attention) in forward order (preset `joita`)."
    ),
    "gmar-l2": "As gmar-l1.",
    "focusvit": (
        "The text differentiates the loss in its equations and the logit in its claims: the loss has the "
        "opposite sign. Here the logit. m* is to be searched on a validation set (`clairvit choose "
        "--tune-start focusvit`, then `m=auto` with its recipe); by default m = ceil(L/2). Repository not readable."
    ),
    "legrad": (
        "Paper: all layers; code: the last two (preset `official`). The code averages all tokens even where "
        "the model reads CLS. What Joita's report computes under this name is relu(G * A) averaged over "
        "keys (preset `joita`)."
    ),
    "ag-cam": (
        "Coporan's equation (feature × attention × mean gradient) is another method; the official code is "
        "for one image."
    ),
    "attcat": (
        "Official code (BERT): a block's attention with its input; SkipPLUS's code: with its output, last "
        "block left out (`pair=output`). FocusViT's text says it needs no gradients; it does."
    ),
    "tam": (
        "Called integrated gradients by others, but the path is in pixel space and there is no factor A − "
        "A'. The authors' two entry points start the chain at layers 4 and 0."
    ),
    "tokentm": (
        "Repository not readable; how NECC is normalised and where heads are averaged follows a third party's code."
    ),
    "ixg": "SkipPLUS reads tokens with their position embedding in them, as here; `level=pixel` is the older form.",
    "vanilla": (
        "Behind LayerNorm the sum over channels is zero up to rounding, so published maps of it on ViTs show noise."
    ),
    "saliency": "Coporan's text differentiates the loss; the original and we the class score.",
    "smoothgrad": "InterpretDL differentiates the probability; the original and we the score.",
    "integrated-gradients": (
        "InterpretDL differentiates the probability. Libraries differ in the rule: see option `rule`."
    ),
    "fullgrad": (
        "Official map: absolute values, rescaled, convolutions only. On a ViT the plain gradient is not complete."
    ),
    "fullgrad-plus": (
        "SkipPLUS: signed sums a token, biases of the head on CLS; complete only with implicit biases or linear rules."
    ),
    "cam": "Needs mean pooling and a linear head; for a ViT the final norm's spread is held fixed.",
    "gradcam": "The CMI report says it cannot be used on ViTs; it can. " + _RELU,
    "gradcam-pp": "Its closed form assumes exp(y) and ReLU features: a heuristic on ViTs. " + _RELU,
    "hirescam": "Same map as token ixg at that place.",
    "gradcam-elementwise": _RELU,
    "layercam": (
        "SkipPLUS equates it with gradcam-elementwise+plus: true only for activations that are never negative."
    ),
    "xgradcam": "Divides by sums of signed activations, near zero on ViTs: weights explode. See xgradcam-plus.",
    "scorecam": (
        "The paper's rise over a baseline image cancels in its softmax. The authors' code has no softmax: it weighs by "
        "the class probability (`weights=plain` with score=prob). pytorch-grad-cam stretches feature maps from corner "
        "to corner (preset `jacobgil`). " + _RELU
    ),
    "transatt": (
        "Not row-normalised (the line is commented out in the authors' ViT file); their evaluation skips "
        "block 0. Coporan calls it pixel-level; it is a rollout over tokens."
    ),
    "lrp": _LRP_FILES,
    "partial-lrp": _LRP_FILES,
    "lrp-rollout": _LRP_FILES,
    "deep-taylor": "Made for ReLU networks; on a ViT it is a transfer.",
    "attnlrp": (
        "For ViTs the authors themselves use CP-LRP inside attention and a gamma rule tuned a model; eps-"
        "only maps are noisier. The gradient form is exact for eps 0."
    ),
    "cp-lrp": "At eps 0 the same map as decompx: two papers, one backward.",
    "decompx": "SkipPLUS uses it without bias, as here; the repository's default hands biases out by absdot.",
    "attin": "Made for post-norm BERT, where a LayerNorm follows; a pre-norm ViT has none there.",
    "attin-residual": "Made for post-norm BERT, where a LayerNorm follows; a pre-norm ViT has none there.",
    "globenc": (
        "The repository's rollout has no identity and no row normalisation; SkipPLUS tries other residual strengths."
    ),
    "alti": (
        "SkipPLUS takes the block's output as resultant though the MLP is not in the parts; the original: "
        "the attention's."
    ),
    "vit-cx": (
        "The authors' docstring merges what is less similar than the threshold; their code, and we, what is less "
        "distant. A feature map that is the same everywhere turns their whole map into NaN; here it makes no mask. "
        "Coporan's do-operator on single patches is leave-one-out, not this."
    ),
    "atman": (
        "The paper scales the scores themselves (`shift_min=False`), the authors' code for language models their "
        "distance from the row's lowest; it stores loss before − loss after. Their BLIP port does not shift and, by a "
        "slip, suppresses only the neighbours of a patch, never the patch itself."
    ),
    "counterfactual": (
        "Papers look for a mask by gradient descent and threshold it; here patches are searched one by one and the set "
        "is checked on the model itself."
    ),
    "lime": (
        "lime's code takes a square root, exp(−D²/2w²), where the formula has exp(−D²/w²) (preset `lime`), and paints "
        "a superpixel with its own mean colour. captum measures the distance between images, not samples, at width 1 "
        "with a lasso; xplique too, Euclidean at width 45; InterpretDL normalises the columns, so that its ridge "
        "weighs more."
    ),
    "kernelshap": (
        "Coalitions drawn from the kernel count equally, enumerated ones with its weight: shap and we do both. shap "
        "keeps ten features unless l1_reg=False; captum meets the constraint by a weight of 10⁶; xplique has no "
        "constraint, so that its values do not add up."
    ),
    "rise": (
        "Paper: 8000 masks for a ResNet; the authors' notebook 2000; xplique 4000, as here. The authors' batched class "
        "does not divide by N p; xplique divides each pixel by its own mask sum (`normalise_by_mask_sum`)."
    ),
    "occlusion": (
        "The paper shows the probability behind each position of one grey square; captum gives a pixel the mean of its "
        "windows' whole losses (`share=false`), so that larger windows say larger numbers."
    ),
    "pami": (
        "No code was released: which parts, at which scales, and the blur are our choice; the aggregation is theirs."
    ),
    "hsic": (
        "xplique's output kernel is as wide as the median of the outputs: it moves with a constant added to all logits "
        "and near zero the map is noise (a note says so); the usual rule is `width=distances`. The paper's design is a "
        "Latin hypercube (`design=lhs`). xplique enlarges cells bicubically; here a patch has the mean of its cells."
    ),
}
