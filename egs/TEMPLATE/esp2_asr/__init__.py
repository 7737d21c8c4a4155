"""What the recipes in ESPnet3's form share."""
