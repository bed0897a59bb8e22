"""`scaleray drift`: whether today's runs are still like those of a promoted model."""
