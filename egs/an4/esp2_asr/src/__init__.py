"""What a packed model of this recipe takes along."""
