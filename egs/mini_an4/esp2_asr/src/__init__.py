"""What this recipe adds to ESPnet3's ASR system."""
