"""What a bundle is on disk: manifest, packages, embedding table, store."""
