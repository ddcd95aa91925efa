"""Spark: sessions on Ray, DataFrames routed row by row, and the ledger of what became of them."""

from raydispatch.spark.session import spark_on_ray

__all__ = ["spark_on_ray"]
