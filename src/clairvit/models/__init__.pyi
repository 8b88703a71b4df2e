from .model import Layout as Layout
from .model import Model as Model
from .preprocess import Preprocess as Preprocess
from .text_encoder import TextEncoder as TextEncoder
