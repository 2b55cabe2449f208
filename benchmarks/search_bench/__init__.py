"""How good the search is: problems with a known best, searchers behind one interface, runs kept as data."""
