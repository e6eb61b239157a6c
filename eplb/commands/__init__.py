"""The verbs of ``dspark eplb``: each module offers ``add_arguments(parser)`` and ``run(args) -> int``."""
