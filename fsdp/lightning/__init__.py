"""A strategy for Lightning's Trainer. Importing this registers ``Trainer(strategy="fsdp_flat")``.

For ``import lightning.pytorch`` (2.6.4 or newer); the classes of the package ``pytorch_lightning`` are others.
"""

try:
    from lightning.pytorch.strategies import StrategyRegistry as _StrategyRegistry
except ImportError as error:
    raise ImportError(f"fsdp.lightning needs lightning: pip install 'fsdp[lightning]' ({error})") from error

from fsdp.lightning.strategy import FullyShardedStrategy as FullyShardedStrategy

FullyShardedStrategy.register_strategies(_StrategyRegistry)
