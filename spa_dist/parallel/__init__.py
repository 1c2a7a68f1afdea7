"""Process groups, the DeepSpeed mpu adapter, parameter layouts, tensor-parallel layers; the only importer of megatron.core."""
