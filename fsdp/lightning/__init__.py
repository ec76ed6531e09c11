"""A strategy for Lightning's Trainer. Importing this registers ``Trainer(strategy="fsdp_flat")``.

For ``import lightning.pytorch`` (2.6.4 or newer); the classes of the package ``pytorch_lightning`` are others.
"""

try:
    from lightning.pytorch.strategies import StrategyRegistry as _StrategyRegistry
except ImportError as error:
    raise ImportError(f"fsdp.lightning needs lightning: pip install 'fsdp[lightning]' ({error})") from error

from fsdp.lightning.precision import DoublePrecision as DoublePrecision
from fsdp.lightning.precision import HalfPrecision as HalfPrecision
from fsdp.lightning.precision import MixedPrecision as MixedPrecision
from fsdp.lightning.precision import Precision as Precision
from fsdp.lightning.strategy import FullyShardedStrategy as FullyShardedStrategy

FullyShardedStrategy.register_strategies(_StrategyRegistry)
