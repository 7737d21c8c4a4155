"""What the recipes share: their stages' tools, and how data are fetched and checked."""
