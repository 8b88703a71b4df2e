"""A model that is changed between two explanations is explained as a fresh copy of the changed model, or refused.

Each case builds a model, explains it, changes one thing and explains it again. A second copy is changed before anything
looks at it. Methods of each kind must agree in float64: what was remembered about the model before the change is in
none of the maps.
"""

from __future__ import annotations

import contextvars
import copy
import dataclasses
import enum
import functools
import os
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

import clairvit as cv
from clairvit.errors import ClairError
from helpers.custom_vits import (
    WIDTH,
    Block,
    EinsumAttention,
    FusedAttention,
    HomeMade,
    MatmulAttention,
)
from helpers.rounding import assert_same, same
from helpers.tiny_models import build, shaken

pytestmark = pytest.mark.numeric
TARGET = 1
# Rows of A and G, their product over layers, a rule table, gradients of tokens, dropped tokens.
METHODS = ("genatt", "raw-attention", "rollout", "attnlrp+plus", "gradcam", "leave-one-out")

Pool = Callable[["Net", Tensor], Tensor]


def read(tokens: Tensor, kind: Any) -> Tensor:
    """Return what a head reads: the class token, the mean of the patches, or the last patch."""
    kind = getattr(kind, "value", kind)
    return {"cls": lambda: tokens[:, 0], "mean": lambda: tokens[:, 1:].mean(1), "last": lambda: tokens[:, -1]}[kind]()


class Net(HomeMade):
    """A home-made model whose pooling is any function of the model and its tokens."""

    class_kind = "cls"

    def __init__(self, pool: Pool, attention: type[nn.Module] = FusedAttention, block: type[Block] = Block) -> None:
        super().__init__(lambda: block(attention))
        self.pool = pool

    def forward(self, image: Tensor) -> Tensor:
        return self.head(self.pool(self, self.norm(self.through(self.tokens(image)))))


class PositionedBlock(Block):
    """A block that adds positions of its own, zero in a new model."""

    def __init__(self, attention: type[nn.Module]) -> None:
        super().__init__(attention)
        self.positions = nn.Parameter(torch.zeros(1, 17, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.positions[:, : x.shape[1]])


class ScaledBlock(Block):
    """A block whose branches begin at zero (LayerScale, ReZero)."""

    def __init__(self, attention: type[nn.Module]) -> None:
        super().__init__(attention)
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gain * (super().forward(x) - x)


@dataclasses.dataclass
class Settings:
    kind: str = "cls"


class Slotted:
    __slots__ = ("kind",)

    def __init__(self) -> None:
        self.kind = "cls"


class Kind(enum.Enum):
    CLS = "cls"
    MEAN = "mean"


class Pooler:
    """An object with a method and a nested configuration."""

    kind = "cls"

    def __init__(self) -> None:
        self.settings = Settings()

    def __call__(self, net: Net, tokens: Tensor) -> Tensor:
        return read(tokens, self.settings.kind)

    def by_class(self, net: Net, tokens: Tensor) -> Tensor:
        return read(tokens, self.kind)

    @staticmethod
    def chosen(tokens: Tensor) -> Tensor:
        return read(tokens, "cls")


def seeded(module: nn.Module) -> nn.Module:
    """Return a module in float64 with weights of its own, whatever was drawn before."""
    return shaken(module, 3).double().eval()


def net(pool: Pool, **attributes: Any) -> Callable[[], Net]:
    """Return a function that builds a model with attributes."""

    def make() -> Net:
        module = seeded(Net(pool))
        for name, value in attributes.items():
            setattr(module, name, copy.deepcopy(value))
        return module

    return make


def plain(**options: Any) -> Callable[[], nn.Module]:
    return lambda: seeded(Net(by_kind, **options)).requires_grad_(True)


# Where a flag can be. `GLOBAL` and its like are put back after each test.

GLOBAL = "cls"
GLOBAL_TABLE = {"head": {"kind": "cls"}}
GLOBAL_SETTINGS = Settings()
GLOBAL_MODULE = types.ModuleType("settings_of_a_user")
GLOBAL_MODULE.KIND = "cls"  # type: ignore[attr-defined]
GLOBAL_VARIABLE = contextvars.ContextVar("kind", default="cls")


class GlobalClass:
    KIND = "cls"


def global_kind() -> str:
    return GLOBAL


def by_kind(self: Net, x: Tensor) -> Tensor:
    return read(x, getattr(self, "kind", "cls"))


def closure(kinds: list[str]) -> Pool:
    return lambda _, x: read(x, kinds[-1])


def nonlocal_variable() -> tuple[Pool, Callable[[str], None]]:
    kind = "cls"

    def pool(_: Net, x: Tensor) -> Tensor:
        return read(x, kind)

    def choose(value: str) -> None:
        nonlocal kind
        kind = value

    return pool, choose


def with_closure() -> nn.Module:
    pool, choose = nonlocal_variable()
    module = seeded(Net(pool))
    module.__dict__["_choose"] = choose  # a way in for the test
    return module


def with_default(_: Net, x: Tensor, kind: str = "cls") -> Tensor:
    return read(x, kind)


def set_global(name: str, value: Any) -> Callable[[nn.Module], None]:
    return lambda _: globals().__setitem__(name, value)


def set_attribute(path: str, value: Any) -> Callable[[nn.Module], None]:
    """Return a change of an attribute, `settings.kind`."""
    *parents, name = path.split(".")
    return lambda module: setattr(functools.reduce(getattr, parents, module), name, value)


def change_weights(how: str) -> Callable[[nn.Module], None]:
    """Return a change of the head's and a block's weights, in one of the ways that there are."""

    def change(module: Any) -> None:
        for part in (module.blocks[1].attention.out, module.head):
            value = part.weight.detach().flip(0) * 1.5
            if how == "in place":
                with torch.no_grad():
                    part.weight.copy_(value)
            elif how == "data":
                part.weight.data.copy_(value)
            elif how == "new data":
                part.weight.data = value
            elif how == "new parameter":
                part.weight = nn.Parameter(value)
            elif how == "state_dict":
                part.load_state_dict({"weight": value, "bias": part.bias.detach()})
            elif how == "numpy":
                part.weight.detach().numpy()[...] = value.numpy()
            else:
                part.weight.grad = torch.ones_like(part.weight)
                torch.optim.AdamW([part.weight], lr=0.1).step()
                part.weight.grad = None

    return change


def set_numbers(name: str, scale: float) -> Callable[[nn.Module], None]:
    """Return a change of the parameters of this name in all blocks, which torch counts no version for."""

    def change(module: nn.Module) -> None:
        generator = torch.Generator().manual_seed(5)
        for part in module.modules():
            tensor = getattr(part, name, None)
            if isinstance(tensor, Tensor):
                tensor.data.copy_(scale * torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype))

    return change


def zeroed(make: Callable[[], nn.Module], *names: str) -> Callable[[], nn.Module]:
    """Return a builder of a model whose parameters of these names are zero, as in a new one."""

    def make_zeroed() -> nn.Module:
        module = make()
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                if name.rpartition(".")[2] in names:
                    parameter.zero_()
        return module

    return make_zeroed


def tiny(name: str, **attributes: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        module = build(name).double()
        for key, value in attributes.items():
            setattr(module, key, value)
        return module

    return make


def change_positions(module: Any, scale: float) -> None:
    """Set the last layer of the networks that give relative positions."""
    for block in module.blocks:
        layer = block.attn.rel_pos.mlp.fc2
        layer.weight.data.copy_(scale * torch.linspace(-1, 1, layer.weight.numel()).reshape(layer.weight.shape))
        layer.bias.data.fill_(scale)


def new_positions() -> nn.Module:
    """Return a model with relative positions that are zero, as in a new one."""
    module = build("timm-relpos").double()
    change_positions(module, 0.0)
    return module


def mean_pooled(module: nn.Module, tokens: Tensor) -> Tensor:
    return tokens[:, 1:].mean(1)


def mean_of_patches(self: Net, image: Tensor) -> Tensor:
    return self.head(self.norm(self.through(self.tokens(image)))[:, 1:].mean(1))


def spread(_: nn.Module, __: Any, output: Tensor) -> Tensor:
    """A hook that gives every token the mean of the patches."""
    return output[:, 1:].mean(1, keepdim=True).expand_as(output)


def hooked(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def make_hooked() -> nn.Module:
        module = make()
        module.__dict__["_handle"] = module.norm.register_forward_hook(spread)
        return module

    return make_hooked


def hook_with_flag(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """Return a builder of a model with a hook that obeys a list."""

    def make_hooked() -> nn.Module:
        module, flags = make(), [False]
        module.norm.register_forward_hook(lambda *given: spread(*given) if flags[0] else None)
        module.__dict__["_choose"] = functools.partial(flags.__setitem__, 0)
        return module

    return make_hooked


def stored_attention(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """Return a builder of a model that keeps and counts what it computes, as many do."""

    def make_storing() -> nn.Module:
        module, kept = make(), dict[str, Any]()
        module.__dict__.update(kind="cls", passes=0, history=[])

        def keep(part: nn.Module, given: Any, output: Tensor) -> None:
            kept["output"] = output
            kept["copy"] = output.detach().clone()
            module.__dict__["passes"] += 1
            module.__dict__["history"].append(output.detach())

        module.blocks[0].register_forward_hook(keep)
        return module

    return make_storing


def replace_head(module: Any) -> None:
    generator = torch.Generator().manual_seed(2)
    head = nn.Linear(WIDTH, 5).double()
    head.weight.data.copy_(torch.randn(5, WIDTH, generator=generator, dtype=torch.float64))
    head.bias.data.zero_()
    module.head = nn.Sequential(nn.Identity(), head)


def reorder(module: Any) -> None:
    module.blocks = nn.ModuleList(reversed(module.blocks))


def add_block(module: Any) -> None:
    module.blocks.append(copy.deepcopy(module.blocks[0]))


def share_block(module: Any) -> None:
    module.blocks[1] = module.blocks[0]


def replace_attention(module: Any) -> None:
    for block in module.blocks:
        attention = EinsumAttention().double().eval()
        attention.load_state_dict(block.attention.state_dict())
        block.attention = attention


def replace_norm(module: Any) -> None:
    module.norm = nn.Identity()


def drop_class_token(module: Any) -> None:
    module.tokens = types.MethodType(lambda self, image: self.embed(image) + self.pos_embed[:, 1:], module)
    module.kind = "last"


def enlarge_sequence(module: Any) -> None:
    """Put four registers between the class token and the patches."""
    registers = torch.linspace(-1, 1, 4 * WIDTH, dtype=torch.float64).reshape(1, 4, WIDTH)

    def tokens(self: Net, image: Tensor) -> Tensor:
        x = HomeMade.tokens(self, image)
        return torch.cat([x[:, :1], registers.expand(len(x), -1, -1), x[:, 1:]], 1)

    module.tokens = types.MethodType(tokens, module)


def parametrize(module: Any) -> None:
    torch.nn.utils.parametrizations.weight_norm(module.blocks[0].attention.out)
    set_attribute("kind", "mean")(module)


def hide_module(_: nn.Module, x: Tensor) -> Tensor:
    return read(x, HIDDEN[0].kind)


HIDDEN = [types.SimpleNamespace(kind="cls")]


def flag_tensor(self: Any, x: Tensor) -> Tensor:
    return torch.where(self.use_mean, read(x, "mean"), read(x, "cls"))


def weighted(self: Any, x: Tensor) -> Tensor:
    return (x * self.weights[:, None]).sum(1)


ONE_HOT = torch.eye(17, dtype=torch.float64)[0]
UNIFORM = torch.full((17,), 1 / 17, dtype=torch.float64)


def with_buffer(name: str, value: Tensor, pool: Pool) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        module = seeded(Net(pool))
        module.register_buffer(name, value.clone())
        return module

    return make


def set_buffer(name: str, value: Tensor) -> Callable[[nn.Module], None]:
    return lambda module: getattr(module, name).data.copy_(value)


def set_all(name: str, value: Any) -> Callable[[nn.Module], None]:
    """Return a change of an attribute of every submodule that has it."""

    def change(module: nn.Module) -> None:
        for part in module.modules():
            if hasattr(part, name):
                setattr(part, name, value)

    return change


def halve_heads(module: nn.Module) -> None:
    for part in module.modules():
        for name in ("num_heads", "num_attention_heads"):
            if hasattr(part, name):
                setattr(part, name, 1)
        for name in ("head_dim", "attention_head_size"):
            if hasattr(part, name):
                setattr(part, name, WIDTH)


def mean_for_attention_pool(module: Any) -> None:
    module.attn_pool, module.global_pool = None, "avg"


def set_environment(_: nn.Module) -> None:
    os.environ["KIND_OF_A_USER"] = "mean"


Case = tuple[Callable[[], nn.Module], Callable[[Any], Any]]
IN_ATTRIBUTES: dict[str, Case] = {
    "attribute": (net(by_kind, kind="cls"), set_attribute("kind", "mean")),
    "attribute, to the last patch": (net(by_kind, kind="mean"), set_attribute("kind", "last")),
    "new attribute": (net(by_kind), set_attribute("kind", "mean")),
    "deleted attribute": (net(by_kind, kind="mean"), lambda module: delattr(module, "kind")),
    "list": (net(lambda self, x: read(x, self.kinds[0]), kinds=["cls"]), lambda m: m.kinds.insert(0, "mean")),
    "tuple": (net(lambda self, x: read(x, self.kinds[0]), kinds=("cls",)), set_attribute("kinds", ("mean",))),
    "set": (net(lambda self, x: read(x, max(self.kinds)), kinds={"cls"}), lambda m: m.kinds.add("mean")),
    "dictionary": (
        net(lambda self, x: read(x, self.options["head"]["kind"]), options={"head": {"kind": "cls"}}),
        lambda m: m.options["head"].__setitem__("kind", "mean"),
    ),
    "namespace": (
        net(lambda self, x: read(x, self.settings.kind), settings=types.SimpleNamespace(kind="cls")),
        set_attribute("settings.kind", "mean"),
    ),
    "dataclass": (
        net(lambda self, x: read(x, self.settings.kind), settings=Settings()),
        set_attribute("settings.kind", "mean"),
    ),
    "object with slots": (
        net(lambda self, x: read(x, self.settings.kind), settings=Slotted()),
        set_attribute("settings.kind", "mean"),
    ),
    "nested objects": (
        net(lambda self, x: self.pooler(self, x), pooler=Pooler()),
        set_attribute("pooler.settings.kind", "mean"),
    ),
    "list of objects": (
        net(lambda self, x: read(x, self.stages[0]["head"].kind), stages=[{"head": Settings()}]),
        lambda m: setattr(m.stages[0]["head"], "kind", "mean"),
    ),
    "enumeration": (net(lambda self, x: read(x, self.kind), kind=Kind.CLS), set_attribute("kind", Kind.MEAN)),
    "array": (
        net(lambda self, x: read(x, ["cls", "mean"][int(self.flag[0])]), flag=np.zeros(1)),
        lambda m: m.flag.fill(1),
    ),
    "function": (net(by_kind), set_attribute("pool", mean_pooled)),
    "default of a function": (
        net(lambda self, x: self.read(self, x), read=with_default),
        lambda _: setattr(with_default, "__defaults__", ("mean",)),
    ),
    "partial function": (
        net(lambda self, x: self.read(x), read=functools.partial(read, kind="cls")),
        set_attribute("read", functools.partial(read, kind="mean")),
    ),
    "method of an object": (
        net(by_kind),
        lambda m: setattr(m, "pool", Pooler().by_class) or setattr(Pooler, "kind", "mean"),
    ),
    "closure": (with_closure, lambda m: m._choose("mean")),
    "list in a closure": (
        lambda: seeded(Net(closure(["cls"]))),
        lambda m: m.pool.__closure__[0].cell_contents.append("mean"),
    ),
    "next to what the forward writes": (stored_attention(net(by_kind)), set_attribute("kind", "mean")),
}
ELSEWHERE: dict[str, Case] = {
    "global variable": (net(lambda _, x: read(x, GLOBAL)), set_global("GLOBAL", "mean")),
    "global variable of a function": (net(lambda _, x: read(x, global_kind())), set_global("GLOBAL", "mean")),
    "global dictionary": (
        net(lambda _, x: read(x, GLOBAL_TABLE["head"]["kind"])),
        lambda _: GLOBAL_TABLE["head"].__setitem__("kind", "mean"),
    ),
    "global object": (
        net(lambda _, x: read(x, GLOBAL_SETTINGS.kind)),
        lambda _: setattr(GLOBAL_SETTINGS, "kind", "mean"),
    ),
    "global class": (net(lambda _, x: read(x, GlobalClass.KIND)), lambda _: setattr(GlobalClass, "KIND", "mean")),
    "global module": (net(lambda _, x: read(x, GLOBAL_MODULE.KIND)), lambda _: setattr(GLOBAL_MODULE, "KIND", "mean")),
    "global function": (net(lambda _, x: read(x, global_kind())), set_global("global_kind", lambda: "mean")),
    "context variable": (net(lambda _, x: read(x, GLOBAL_VARIABLE.get())), lambda _: GLOBAL_VARIABLE.set("mean")),
    "environment": (net(lambda _, x: read(x, os.environ.get("KIND_OF_A_USER", "cls"))), set_environment),
    "object in a global list": (net(hide_module), lambda _: setattr(HIDDEN[0], "kind", "mean")),
    "attribute of the class": (
        net(lambda self, x: read(x, self.class_kind)),
        lambda _: setattr(Net, "class_kind", "mean"),
    ),
    "static method": (
        net(lambda _, x: Pooler.chosen(x)),
        lambda _: setattr(Pooler, "chosen", staticmethod(lambda x: read(x, "mean"))),
    ),
    "forward of the instance": (plain(), lambda m: setattr(m, "forward", types.MethodType(mean_of_patches, m))),
    "forward of the class": (plain(), lambda _: setattr(Net, "forward", mean_of_patches)),
    "forward of a submodule": (
        plain(),
        lambda m: setattr(m.norm, "forward", lambda x: spread(m.norm, (), nn.LayerNorm.forward(m.norm, x))),
    ),
    "forward of a block": (
        plain(),
        lambda m: setattr(m.blocks[1], "forward", lambda x: spread(m, (), Block.forward(m.blocks[1], x))),
    ),
    "method of the class": (
        plain(),
        lambda _: setattr(Net, "through", lambda self, x: self.blocks[1](self.blocks[0](x)).flip(1)),
    ),
    "code of a function": (
        net(by_kind),
        lambda _: setattr(by_kind, "__code__", mean_pooled.__code__.replace(co_name="by_kind")),
    ),
    "hook added": (plain(), lambda m: m.norm.register_forward_hook(spread)),
    "hook removed": (hooked(plain()), lambda m: m._handle.remove()),
    "hook before a module": (
        plain(),
        lambda m: m.head.register_forward_pre_hook(lambda *given: (given[1][0].flip(1),)),
    ),
    "hook that obeys a flag": (hook_with_flag(plain()), lambda m: m._choose(True)),
    "hook on all modules": (
        plain(),
        lambda m: register_module_forward_hook(lambda part, *given: spread(part, *given) if part is m.norm else None),
    ),
}
IN_TENSORS: dict[str, Case] = {
    **{f"weights, {how}": (plain(), change_weights(how)) for how in ("in place", "data", "new data", "new parameter")},
    **{f"weights, {how}": (plain(), change_weights(how)) for how in ("state_dict", "numpy", "optimizer")},
    "buffer that is a flag": (
        with_buffer("use_mean", torch.tensor(False), flag_tensor),
        set_buffer("use_mean", torch.tensor(True)),
    ),
    "buffer of pooling weights": (with_buffer("weights", ONE_HOT, weighted), set_buffer("weights", UNIFORM)),
    "tensor that is no buffer": (
        lambda: (module := seeded(Net(weighted)), module.__dict__.update(weights=ONE_HOT.clone()))[0],
        lambda m: m.weights.data.copy_(UNIFORM),
    ),
    "list of tensors": (
        net(lambda self, x: (x * self.tables[0][:, None]).sum(1), tables=[ONE_HOT]),
        lambda m: m.tables.insert(0, UNIFORM.clone()),
    ),
    "positions in blocks, zero at first": (
        zeroed(lambda: seeded(Net(by_kind, block=PositionedBlock)), "positions"),
        set_numbers("positions", 2.0),
    ),
    "LayerScale, zero at first": (
        zeroed(lambda: seeded(Net(lambda _, x: read(x, "mean"), block=ScaledBlock)), "gain"),
        set_numbers("gain", 1.0),
    ),
    "head, zero at first": (
        lambda: (module := seeded(Net(mean_pooled)), module.head.weight.data.zero_())[0],
        lambda m: m.head.weight.data.copy_(torch.linspace(-1, 1, m.head.weight.numel()).reshape(m.head.weight.shape)),
    ),
    "timm BEiT, positions": (
        zeroed(tiny("timm-beit"), "relative_position_bias_table"),
        set_numbers("relative_position_bias_table", 2.0),
    ),
    "timm relpos, positions": (new_positions, lambda m: change_positions(m, 2.0)),
    "timm CaiT, LayerScale": (zeroed(tiny("timm-cait"), "gamma_1", "gamma_2"), set_numbers("gamma_1", 1.0)),
    "timm EVA, weights": (tiny("timm-eva02"), set_numbers("cls_token", 2.0)),
}
IN_LIBRARIES: dict[str, Case] = {
    "head": (plain(), replace_head),
    "norm": (plain(), replace_norm),
    "block removed": (plain(), lambda m: m.blocks.__delitem__(1)),
    "block replaced": (plain(), lambda m: m.blocks.__setitem__(1, copy.deepcopy(m.blocks[0]))),
    "blocks reordered": (plain(), reorder),
    "block added": (plain(), add_block),
    "block shared": (plain(), share_block),
    "block without effect": (plain(), lambda m: m.blocks.__setitem__(0, nn.Identity())),
    "attention written in another way": (plain(attention=MatmulAttention), replace_attention),
    "another kind of attention": (plain(), lambda m: setattr(m.blocks[0], "attention", nn.Identity())),
    "class token dropped": (plain(), drop_class_token),
    "registers added": (plain(), enlarge_sequence),
    "parametrised weight": (plain(), parametrize),
    "training mode": (plain(), lambda m: m.train() and setattr(m, "kind", "mean")),
    "training mode alone": (plain(), lambda m: m.train()),
    "requires_grad": (plain(), lambda m: m.requires_grad_(False)),
    "single precision": (plain(), lambda m: m.float()),
    "timm global_pool": (tiny("timm-vit"), set_attribute("global_pool", "avg")),
    "timm pool_include_prefix": (tiny("timm-vit-avg"), set_attribute("pool_include_prefix", True)),
    "timm fused_attn": (tiny("timm-vit"), set_all("fused_attn", False)),
    "timm num_prefix_tokens": (tiny("timm-vit-avg"), set_attribute("num_prefix_tokens", 0)),
    "timm number of heads": (tiny("timm-vit"), halve_heads),
    "timm blocks": (tiny("timm-deep"), lambda m: setattr(m, "blocks", m.blocks[:2])),
    "timm patch size": (tiny("timm-vit"), lambda m: m.set_input_size((32, 32), patch_size=(16, 16))),
    "timm head": (tiny("timm-vit"), lambda m: m.reset_classifier(0) and None),
    "timm SigLIP, mean for the attention pool": (tiny("timm-siglip-map"), mean_for_attention_pool),
    "timm gradient checkpointing": (tiny("timm-vit"), lambda m: m.set_grad_checkpointing(True)),
    "open_clip pool_type": (tiny("open_clip-tower"), set_attribute("pool_type", "avg")),
    "open_clip final_ln_after_pool": (tiny("open_clip-avg"), set_attribute("final_ln_after_pool", True)),
    "transformers attention": (tiny("hf-vit-sdpa"), lambda m: m.set_attn_implementation("eager")),
    "transformers back to fused attention": (tiny("hf-vit-eager"), lambda m: m.set_attn_implementation("sdpa")),
    "transformers number of heads": (tiny("hf-vit-eager"), halve_heads),
    "torchvision encoder": (tiny("torchvision-vit"), lambda m: m.encoder.layers.__delitem__(1)),
}
OF_TORCH: dict[str, Case] = {
    "default dtype": (plain(), lambda _: torch.set_default_dtype(torch.float64)),
    "fused kernels off": (plain(), lambda _: torch.backends.cuda.enable_flash_sdp(False)),
}
CASES = IN_ATTRIBUTES | ELSEWHERE | IN_TENSORS | IN_LIBRARIES | OF_TORCH
# What changes no map, and what has no class to explain afterwards
WITHOUT_EFFECT = {
    *("attention written in another way", "training mode alone", "requires_grad", "timm fused_attn"),
    *("timm gradient checkpointing", *OF_TORCH),
}
EMBEDDINGS = {"timm head"}
IN_PART = {
    "positions in blocks, zero at first",
    "torchvision encoder",
}  # gradcam is refused: positions are added inside the block


def explained(module: nn.Module, image: Tensor) -> dict[str, Tensor | str]:
    """Return what each method, and the deletion metric, give: numbers, or the error."""
    dtype = next(module.parameters()).dtype
    scores = (
        True if type(module).__module__.startswith("open_clip") else None
    )  # the towers' embeddings are taken for them
    model = cv.wrap(module, size=32, mean=(0.5,) * 3, std=(0.5,) * 3, classifier=scores)
    results: dict[str, Tensor | str] = {}
    for method in METHODS:
        try:
            results[method] = cv.explain(
                model, image.to(dtype), method, target=TARGET if model.classifier else None
            ).maps
        except ClairError as error:
            results[method] = str(error)
    try:
        score = cv.evaluate(model, image.to(dtype), "ixg", "deletion", target=TARGET, baselines=False)
        results["deletion"] = score.values
    except ClairError as error:
        results["deletion"] = str(error)
    return results


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    """Put back what the cases change outside the model."""
    variables, environment = dict(globals()), dict(os.environ)
    classes = {kind: dict(vars(kind)) for kind in (Net, Pooler, GlobalClass)}
    defaults, code = with_default.__defaults__, by_kind.__code__
    hooks = nn.modules.module._global_forward_hooks
    token, dtype = GLOBAL_VARIABLE.set("cls"), torch.get_default_dtype()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    GLOBAL_VARIABLE.reset(token)
    hooks.clear()
    globals().update({name: variables[name] for name in ("GLOBAL", "global_kind")})
    GLOBAL_TABLE["head"]["kind"] = GLOBAL_SETTINGS.kind = HIDDEN[0].kind = "cls"
    GLOBAL_MODULE.KIND = "cls"  # type: ignore[attr-defined]
    for kind, attributes in classes.items():
        for name in ("class_kind", "forward", "through", "kind", "chosen", "KIND"):
            if name in attributes:
                setattr(kind, name, attributes[name])
            elif name in vars(kind):
                delattr(kind, name)
    with_default.__defaults__, by_kind.__code__ = defaults, code
    os.environ.clear()
    os.environ.update(environment)
    torch.set_default_dtype(dtype)
    torch.backends.cuda.enable_flash_sdp(True)


@pytest.mark.parametrize("case", CASES)
def test_a_changed_model_is_explained_as_a_fresh_copy_of_it(case: str) -> None:
    make, change = CASES[case]
    image = torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    module, fresh = make(), make()
    before = explained(module, image)
    change(module)
    change(fresh)
    again, expected = explained(module, image), explained(fresh, image)
    for name, value in expected.items():
        other = again[name]
        if isinstance(value, str) or isinstance(other, str):
            assert other == value, name
        else:
            assert_same(other, value, label=name)
    assert case in EMBEDDINGS | IN_PART or all(isinstance(value, Tensor) for value in expected.values())
    changed = [name for name, value in expected.items() if not equal(before[name], value)]
    assert bool(changed) is (case not in WITHOUT_EFFECT), "the case changes nothing, or is listed as if"


def equal(first: Tensor | str, second: Tensor | str) -> bool:
    return isinstance(first, Tensor) and isinstance(second, Tensor) and same(first, second)
