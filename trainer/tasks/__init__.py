"""Labels, losses and metrics of each task. Knows no model family, no data source and no layout."""
