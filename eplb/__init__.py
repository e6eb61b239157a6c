"""Expert placement: plans, loads, files and migration. Plans and files need only numpy."""
