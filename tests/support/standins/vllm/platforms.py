"""vLLM's platform: a single object, which is asked for its kind and for the name of its communicator's class."""


class CpuPlatform:
    cpu = True

    def is_cpu(self):
        return self.cpu

    @classmethod
    def get_device_communicator_cls(cls):
        return "vllm.distributed.device_communicators.cpu_communicator.CpuCommunicator"


current_platform = CpuPlatform()
