"""A folder that Spark can reach: on this machine, or wherever Hadoop's file systems lead."""

import json
from collections.abc import Mapping
from typing import Any

from raydispatch.errors import InvalidParameter


class Folder:
    """A folder by path or URL."""

    def __init__(self, spark: Any, path: str) -> None:
        jvm = spark.sparkContext._jvm
        self._jvm = jvm
        try:
            raw = jvm.org.apache.hadoop.fs.Path(path)
            self._files = raw.getFileSystem(spark.sparkContext._jsc.hadoopConfiguration())
        except Exception as error:
            java = getattr(error, "java_exception", None)
            words = java.getMessage() if java is not None else str(error).splitlines()[0]
            raise InvalidParameter(f"Spark knows no way to the folder {path!r}: {words}") from None
        self.path = str(raw.makeQualified(self._files.getUri(), self._files.getWorkingDirectory()).toString())

    def has_parquet(self) -> bool:
        """Whether somebody has written here."""
        return any(name.endswith(".parquet") for name in self._names())

    def remove(self) -> None:
        """Everything in it."""
        self._files.delete(self._jvm.org.apache.hadoop.fs.Path(self.path), True)

    def write(self, name: str, content: Mapping[str, object]) -> None:
        """A small file of JSON."""
        stream = self._files.create(self._jvm.org.apache.hadoop.fs.Path(self.path, name), True)
        try:
            stream.write(bytearray(json.dumps(content).encode()))
        finally:
            stream.close()

    def read(self, name: str) -> Any:
        """What was written; None if there is none."""
        place = self._jvm.org.apache.hadoop.fs.Path(self.path, name)
        if not self._files.exists(place):
            return None
        stream = self._files.open(place)
        try:
            return json.loads(bytes(self._jvm.org.apache.commons.io.IOUtils.toByteArray(stream)).decode())
        finally:
            stream.close()

    def _names(self) -> list[str]:
        place = self._jvm.org.apache.hadoop.fs.Path(self.path)
        if not self._files.exists(place):
            return []
        return [status.getPath().getName() for status in self._files.listStatus(place)]
