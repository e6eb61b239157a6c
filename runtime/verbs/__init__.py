"""One module a verb of the command line: ``add_arguments(parser)`` and ``run(args)``."""
