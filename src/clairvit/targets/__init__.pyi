import clairvit.tracing.neuron as _neuron

from .base import ScoreContext as ScoreContext
from .base import Target as Target
from .base import TargetBatch as TargetBatch
from .contrast import Contrast as Contrast
from .function import Output as Output
from .query import Query as Query
from .region import Region as Region
from .similar import Similar as Similar
from .text import NEUTRAL_PROMPTS as NEUTRAL_PROMPTS
from .text import Text as Text
from .text_features import text_features as text_features
from .token import NextToken as NextToken

Direction = _neuron.Direction
Neuron = _neuron.Neuron
