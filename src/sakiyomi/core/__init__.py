"""What every layer uses: errors, parameters, results, trees, text, files. It knows no models."""
