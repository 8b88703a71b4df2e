# The public names, imported when they are first used (lazy_loader reads this list, and so do type checkers).
# ruff: noqa: I001  they stand in the order of docs/api.md
from ._version import __version__ as __version__

# Models
from .models.load import load as load
from .models.wrap import wrap as wrap
from .models.model import Model as Model, Layout as Layout
from .registry import list_models as list_models

# Explanations
from .methods.explain import explain as explain, compare as compare
from .methods.explanation import Explanation as Explanation, Comparison as Comparison
from .registry import list_methods as list_methods, parse_method as parse_method
from .methods.recommended import recommended_methods as recommended_methods
from .methods.match import match as match
from .methods.generation import generate as generate
from .methods.recipe import Recipe as Recipe
from .citations import cite as cite
from .methods.registry import method as method

# Targets
from .targets.contrast import Contrast as Contrast
from .targets.text import Text as Text
from .targets.similar import Similar as Similar
from .targets.region import Region as Region
from .targets.query import Query as Query
from .targets.token import NextToken as NextToken
from .targets.function import Output as Output
from .tracing.neuron import Neuron as Neuron

# Activations
from .tracing.trace import trace as trace, Trace as Trace
from .tracing.tail import tail as tail
from .methods.features import features as features
from .methods.intervention import intervene as intervene, intervene_sweep as intervene_sweep
from .perturbation.site import Site as Site
from .methods.logit_lens import logit_lens as logit_lens

# Scores
from .metrics.evaluate import evaluate as evaluate
from .metrics.score import Score as Score, Scores as Scores
from .registry import list_metrics as list_metrics, parse_metric as parse_metric
from .metrics.registry import metric as metric
from .metrics.check import check_maps as check_maps
from .metrics.certify import certify as certify
from .metrics.answer_check import reference as reference
from .selection.choose import choose as choose
from .selection.calibrate import calibrate as calibrate
from .selection.result import Selection as Selection

# Audit
from .audit.expect import expect as expect
from .audit.mistakes import mistakes as mistakes

# Studies
from .bench.plan import Study as Study
from .bench.run import run_study as run_study
from .reports.files import report as report

# Diagnosis
from .diagnostics.doctor import doctor as doctor
from .errors import ClairError as ClairError, ClairWarning as ClairWarning

# Modules
from . import errors as errors
from . import targets as targets
from . import models as models
from . import results as results
from . import ensembles as ensembles
from . import aggregation as aggregation
from . import recorders as recorders
from . import rules as rules
from . import extend as extend
